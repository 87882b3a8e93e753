"""A trainer with FSDP on several ranks and engines of vLLM, as actors of Ray. Every rank offers its own shards.

    python examples/vllm_ray.py MODEL FOLDER

It prints what travelled for each version and which tokens each engine then samples, and saves the last one in FOLDER.
"""

import sys
from contextlib import contextmanager

import ray
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from starling.weightsync.vllm.backend.sender import SenderOptions, WeightSender

NUM_RANKS, NUM_ENGINES, VERSIONS, PROMPT = 2, 1, 3, [5, 17, 3, 20]


@ray.remote(num_cpus=0, num_gpus=int(torch.cuda.is_available()))
class Engine(AsyncLLM):
    def __init__(self, path):
        transfer = WeightTransferConfig(backend="starling")
        sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
        arguments = AsyncEngineArgs(path, dtype="float32", weight_transfer_config=transfer, **sizes)
        config = arguments.create_engine_config()
        super().__init__(config, Executor.get_class(config), log_stats=False)

    async def sample(self, prompt):
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        async for found in self.generate({"prompt_token_ids": prompt}, greedy, "sample"):
            tokens = found.outputs[0].token_ids
        return list(tokens)


def train(rank, client, meeting, path, folder):
    dist.init_process_group("gloo", store=dist.TCPStore(*meeting), rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(rank)  # of its data
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    vocabulary = model.get_input_embeddings().num_embeddings
    options = SenderOptions(host=ray.util.get_node_ip_address())
    sender = WeightSender(model, client, rank=rank, options=options)
    sender.join()
    for _ in range(VERSIONS):
        tokens = torch.randint(vocabulary, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with CommDebugMode() as collectives:
            sender.stage()  # vLLM generates meanwhile
            sender.switch(paused(client))
        if rank == 0:
            sent = [report.bytes_by_source for report in sender.report.pulls.values()]
            counts = dict(collectives.get_comm_counts())
            print(f"version {sender.version}: {sent} bytes, collectives: {counts}", flush=True)
            print(f"tokens: {ray.get([engine.sample.remote(PROMPT) for engine in client.handles])}", flush=True)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(full, f"{folder}/trained.pt")
    sender.close()
    dist.destroy_process_group()


@contextmanager
def paused(client):
    ray.get([engine.pause_generation.remote(mode="keep") for engine in client.handles])
    yield
    ray.get([engine.resume_generation.remote() for engine in client.handles])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ray.init()
    client = RayVLLMWeightSyncClient([Engine.remote(sys.argv[1]) for _ in range(NUM_ENGINES)])
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    arguments = ((host, store.port), *sys.argv[1:])
    others = [ray.remote(num_cpus=0)(train).remote(rank, None, *arguments) for rank in range(1, NUM_RANKS)]
    train(0, client, *arguments)  # rank 0 alone calls the engines
    ray.get(others)
