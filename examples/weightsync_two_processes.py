"""Weight sync between two processes, a trainer and an engine, without the rest of Starling.

    python examples/weightsync_two_processes.py [ucx|tcp|local|nccl|gloo]

The engine stores the trainer's two projections fused in one tensor; only its layout has to describe that.
"""

import multiprocessing.connection
import sys

import torch

from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, decode_layout, encode
from starling.weightsync.plan.planner import decode_plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

WIDTH, VERSIONS, DEADLINE_S = 1024, 3, 30.0


def train(engine: multiprocessing.connection.Connection, transport: str) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, WIDTH, bias=False) for name in ("gate", "up")})
    layout = layout_of(model.state_dict(), "trainer")
    with Publisher(layout, transport=transport) as publisher:
        engine.send_bytes(encode(make_plan(layout, decode_layout(engine.recv_bytes()))))
        for version in range(VERSIONS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            engine.send_bytes(encode(publisher.publish(version, model.state_dict())))
            engine.recv_bytes()  # a real trainer continues; a reader that is two versions late pulls a newer one


def generate(trainer: multiprocessing.connection.Connection) -> None:
    fused = {"gate_up": torch.empty(2 * WIDTH, WIDTH)}
    specs = tuple(TensorSpec(name=f"{n}.weight", shape=(WIDTH, WIDTH), dtype="float32") for n in ("gate", "up"))
    fields = {"box": Box(offset=(0, 0), size=(WIDTH, WIDTH)), "storage": "gate_up", "strides": (WIDTH, 1)}
    shards = tuple(Shard(tensor=i, offset_bytes=i * WIDTH * WIDTH * 4, **fields) for i in range(2))
    layout = Layout(replica="engine", tensors=specs, ranks=(RankLayout(place=Place(), shards=shards),))
    trainer.send_bytes(encode(layout))
    puller, plan = Puller(layout), decode_plan(trainer.recv_bytes())
    for _ in range(VERSIONS):
        offer = decode_offer(trainer.recv_bytes())
        report = puller.pull(offer, plan, deadline_s=DEADLINE_S)  # the engine may generate meanwhile
        puller.switch(fused)  # between two tokens
        assert puller.attest(fused, offer) == offer.root
        print(f"version {puller.version}: {report.size_bytes / report.seconds / 1e9:.2f} GB/s over {report.transport}")
        trainer.send_bytes(b"adopted")
    puller.close()


if __name__ == "__main__":
    trainer_end, engine_end = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=generate, args=(engine_end,), daemon=True)
    engine.start()  # a daemon: it ends if the trainer fails
    engine_end.close()  # so that the trainer notices when the engine's process ends
    train(trainer_end, sys.argv[1] if len(sys.argv) > 1 else "ucx")
    engine.join(DEADLINE_S)
