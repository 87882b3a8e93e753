"""Reference side of controller_side_by_side.py: a controller over HTTP and Redis, reduced to its traffic.

    python controller_http.py controller | policy API REDIS | rollouts API NUM

The pattern is Cosmos-RL's, the code is not. A rollout posts a group as JSON to ``/api/rollout``; the controller
(FastAPI, one uvicorn process) checks it with pydantic, makes one object of each completion, and adds each in
MessagePack to the Redis stream ``<policy>_rollout``, from which the policy reads at most 8 at a time, waiting 10 s,
and checks them with pydantic again. Commands go by the stream ``<replica>_command``, at most 5 at a time. Prompts are
fetched from ``/api/next_prompt``; a policy acknowledges steps at ``/api/policy/train_ack``. Token ids and
log-probabilities are lists of lists, one short list for each token, because they may hold alternatives.

Omitted in favour of this side: a new connection for each request (a session is reused), the controller's filters,
tokenizer and log lines, the hand-over between threads in the policy, and persistence. Added: uvloop and httptools. The
heartbeat of each replica, one per minute, is negligible; each posts one at its start.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from typing import Any

import msgpack
import redis
import requests
import uvicorn
import uvloop
from controller_traffic import GROUP_SIZE, POLICY, Result, hear, lead_rollouts, make_result, say
from fastapi import FastAPI
from pydantic import BaseModel

BLOCK_MS = 10_000
MAX_ROLLOUTS, MAX_COMMANDS, MAX_STREAM = 8, 5, 10_000
START_TIMEOUT_S = 20.0
HTTP_TIMEOUT_S = 60.0


# --- messages ------------------------------------------------------------------------------------------------------


class Register(BaseModel):
    """A replica announces itself."""

    replica_name: str
    role: str
    mesh_names: list[str] = ["pp", "dp_shard", "cp", "tp"]
    ranks: list[int] = [0, 0, 0, 0]
    group_size: list[int] = [1, 1, 1, 1]
    global_rank: int = 0
    host_ip: str = "127.0.0.1"
    host_name: str = "localhost"


class Heartbeat(BaseModel):
    """Heartbeat of a replica."""

    replica_name: str


class TrainAck(BaseModel):
    """A policy has trained a step."""

    replica_name: str
    weight_step: int
    total_steps: int
    profile_finished: bool = False
    report_data: dict[str, Any] = {}


class Payload(BaseModel):
    """A prompt, and later its completions; per token a list of alternatives."""

    prompt: str | None = None
    prompt_idx: int = -1
    reference_answer: str | None = None
    weight_version: int = 0
    completions: list[str] | None = None
    n_ignore_prefix_tokens: list[int] | None = None
    rewards: list[float] | None = None
    advantages: list[float] | None = None
    valid: bool = True
    completion_token_ids: list[list[list[int]]] | None = None
    completion_logprobs: list[list[list[float]]] | None = None
    prompt_token_ids: list[list[int]] | None = None
    extra_info: dict[str, Any] | None = None


class RolloutRequest(BaseModel):
    """The results of one rollout replica."""

    src_replica_name: str
    src_global_rank: int | None = None
    payloads: list[Payload]
    metrics: dict[str, Any] = {}
    is_end: bool = False


class Rollout(BaseModel):
    """One completion, as sent to a policy."""

    prompt: str | None = None
    prompt_idx: int = -1
    completion: str
    reward: float
    advantage: float
    weight_version: int = 0
    is_end: bool = False
    n_ignore_prefix_tokens: int = 0
    completion_token_ids: list[list[int]] | None = None
    completion_logprobs: list[list[float]] | None = None
    prompt_token_ids: list[list[int]] | None = None
    extra_info: dict[str, Any] | None = None


@dataclass(frozen=True)
class DataFetch:
    """Train a step: the most frequent command to a policy."""

    replica_name: str
    items_count: int
    global_step: int
    total_steps: int
    remain_samples_num: int
    do_save: bool = False
    do_profile: bool = False
    active_steps: int = 1
    rank_filter: list[int] = field(default_factory=lambda: [0])
    record_shape: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_modules: bool = False
    uuid_value: str = ""
    scope: int = 1
    command_type: str = "DATA_FETCH"


def payload_of(result: Result, index: int, *, tokens: bool) -> Payload:
    """Return a rollout's request body for one group."""
    return Payload(
        prompt=result.prompt,
        prompt_idx=index,
        weight_version=7,
        completions=result.texts,
        n_ignore_prefix_tokens=[0] * GROUP_SIZE,
        rewards=result.rewards,
        advantages=result.rewards,
        completion_token_ids=[[[token] for token in row] for row in result.token_ids] if tokens else None,
        completion_logprobs=[[[value] for value in row] for row in result.logprobs] if tokens else None,
        prompt_token_ids=[[token] for token in result.prompt_ids] if tokens else None,
    )


def rollouts_of(payload: Payload) -> list[Rollout]:
    """Return one object for each completion of a group."""
    completions, rewards, advantages = payload.completions or [], payload.rewards or [], payload.advantages or []
    ids, logprobs = payload.completion_token_ids, payload.completion_logprobs
    return [
        Rollout(
            prompt=payload.prompt,
            prompt_idx=payload.prompt_idx,
            completion=completion,
            reward=rewards[i],
            advantage=advantages[i],
            weight_version=payload.weight_version,
            completion_token_ids=None if ids is None else ids[i],
            completion_logprobs=None if logprobs is None else logprobs[i],
            prompt_token_ids=payload.prompt_token_ids,
        )
        for i, completion in enumerate(completions)
    ]


# --- the controller ------------------------------------------------------------------------------------------------


def serve(stream: redis.Redis, replicas: dict[str, str]) -> FastAPI:
    """Return the controller's HTTP app; it adds results to the policy's stream before it answers."""
    app = FastAPI()

    @app.post("/api/register")
    async def register(request: Register) -> dict[str, str]:
        replicas[request.replica_name] = request.role
        return {"message": "registered"}

    @app.post("/api/heartbeat")
    async def heartbeat(request: Heartbeat) -> dict[str, str]:
        return {"message": f"heard {request.replica_name}"}

    @app.get("/api/next_prompt")
    async def next_prompt(n: int) -> dict[str, Any]:
        text = "Spell this word backward: benchmark"
        prompts = [Payload(prompt=text, prompt_idx=i, weight_version=7) for i in range(n)]
        return {"payloads_list": prompts, "is_end": False}

    @app.post("/api/rollout")
    async def rollout(request: RolloutRequest) -> dict[str, str]:
        for payload in request.payloads:
            for made in rollouts_of(payload):
                entry = {"rollout": msgpack.packb(made.model_dump()), "timestamp": datetime.now().isoformat()}
                stream.xadd(f"{POLICY}_rollout", entry, maxlen=MAX_STREAM)
        return {"message": "stored"}

    @app.post("/api/policy/train_ack")
    async def train_ack(request: TrainAck) -> dict[str, str]:
        return {"message": f"acknowledged {request.weight_step}"}

    return app


def send_commands(stream: redis.Redis, num: int) -> None:
    """Publish commands to the policy one by one; report the start time."""
    begin = time.monotonic_ns()
    for number in range(num):
        command = DataFetch(POLICY, 128, number, 1000, 128_000, uuid_value=str(uuid.uuid4()))
        entry = {"command": msgpack.packb(asdict(command)), "timestamp": datetime.now().isoformat()}
        stream.xadd(f"{POLICY}_command", entry, maxlen=MAX_STREAM)
    say(began=begin)


def run_controller() -> None:
    """Start Redis without persistence, serve until standard input ends, and stop Redis."""
    with tempfile.TemporaryDirectory(prefix="starling-redis-") as folder:
        redis_port = free_port()
        options = f"--port {redis_port} --bind 127.0.0.1 --appendonly no --dir {folder} --save".split()
        server = subprocess.Popen(["redis-server", *options, ""], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            serve_with(redis_port)
        finally:
            server.terminate()
            server.wait(START_TIMEOUT_S)


def serve_with(redis_port: int) -> None:
    """Serve with the Redis at `redis_port`."""
    stream = connect(redis_port)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    api = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = serve(stream, {})
    config = uvicorn.Config(app, access_log=False, log_level="warning", http="httptools", timeout_keep_alive=3600)
    server = uvicorn.Server(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def handle_commands() -> None:
            try:
                while True:
                    if num := hear().get("commands"):
                        loop.call_soon_threadsafe(send_commands, stream, num)
            finally:
                server.should_exit = True

        threading.Thread(target=handle_commands, daemon=True).start()
        say(api=api, redis=redis_port, versions=versions(stream), **sizes())
        await server.serve(sockets=[listener])

    uvloop.run(run())


def versions(stream: redis.Redis) -> dict[str, str]:
    """Return the versions of this side's software."""
    packages = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "requests", "redis", "msgpack")
    return {
        "redis-server": stream.info("server")["redis_version"],
        **{name: metadata.version(name) for name in packages},
    }


def sizes() -> dict[str, int]:
    """Return the bytes of a group and of a command."""
    found = {}
    for name, tokens in (("tokens", True), ("text", False)):
        payload = payload_of(make_result(0), 0, tokens=tokens)
        request = RolloutRequest(src_replica_name="rollout-0", payloads=[payload])
        found[f"http_{name}_bytes"] = len(requests.compat.json.dumps(request.model_dump()))
        found[f"redis_{name}_bytes"] = sum(len(msgpack.packb(made.model_dump())) for made in rollouts_of(payload))
    command = DataFetch(POLICY, 128, 1, 1000, 128_000, uuid_value=str(uuid.uuid4()))
    return {**found, "command_bytes": len(msgpack.packb(asdict(command)))}


def free_port() -> int:
    """Return a port that is free now; Redis cannot choose one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def connect(port: int) -> redis.Redis:
    """Return a client of the Redis at `port`, once it answers."""
    client = redis.Redis(host="127.0.0.1", port=port, db=0, decode_responses=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.ping()
            return client
        except redis.exceptions.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# --- the replicas --------------------------------------------------------------------------------------------------


class HttpLine:
    """A replica's requests to the controller, over one connection."""

    def __init__(self, api: str, name: str, role: str, index: int = 0) -> None:
        """Announce the replica."""
        self._api, self._name, self._index = api, name, index
        self._session = requests.Session()
        self.post("/api/register", Register(replica_name=name, role=role))
        self.post("/api/heartbeat", Heartbeat(replica_name=name))

    def post(self, path: str, body: BaseModel) -> None:
        """Post a body, and wait for the answer."""
        self._session.post(self._api + path, json=body.model_dump(), timeout=HTTP_TIMEOUT_S).raise_for_status()

    def acquire(self) -> None:
        """Poll for the next prompt, of which there always is one."""
        answer = self._session.get(self._api + "/api/next_prompt", params={"n": 1}, timeout=HTTP_TIMEOUT_S)
        answer.raise_for_status()
        for payload in answer.json()["payloads_list"]:
            Payload.model_validate(payload)

    def deliver(self, result: Result, *, tokens: bool) -> None:
        """Post a result."""
        payload = payload_of(result, self._index, tokens=tokens)
        self.post("/api/rollout", RolloutRequest(src_replica_name=self._name, payloads=[payload]))


def run_policy(api: str, redis_port: int) -> None:
    """Run the policy: read the expected messages, and report when each was decoded."""
    line, stream = HttpLine(api, POLICY, "POLICY"), connect(redis_port)
    latest = {"rollout": b"0-0", "command": b"0-0"}

    def read(kind: str, count: int) -> list[Any]:
        found = stream.xread({f"{POLICY}_{kind}": latest[kind]}, count=count, block=BLOCK_MS)
        entries = [entry for _, entries in found for entry in entries]
        if entries:
            latest[kind] = entries[-1][0]
        return [msgpack.unpackb(fields[kind.encode()]) for _, fields in entries]

    say(joined=POLICY)
    step = 0
    while True:
        told = hear()
        if "commands" in told:
            got = 0
            while got < told["commands"]:
                got += len([DataFetch(**fields) for fields in read("command", MAX_COMMANDS)])
            say(decoded=time.monotonic_ns())
            continue
        missing = dict.fromkeys(range(told["results"]), GROUP_SIZE)
        decoded = dict.fromkeys(missing, 0)
        while any(missing.values()):
            for fields in read("rollout", MAX_ROLLOUTS):
                rollout = Rollout.model_validate(fields)
                missing[rollout.prompt_idx] -= 1
                decoded[rollout.prompt_idx] = time.monotonic_ns()
        step += 1
        line.post("/api/policy/train_ack", TrainAck(replica_name=POLICY, weight_step=step, total_steps=1000))
        say(decoded=list(decoded.values()))


def main() -> None:
    """Run one of the processes of this side."""
    role, *rest = sys.argv[1:]
    if role == "controller":
        run_controller()
    elif role == "policy":
        run_policy(rest[0], int(rest[1]))
    else:
        api = rest[0]
        lead_rollouts(int(rest[1]), lambda index: HttpLine(api, f"rollout-{index}", "ROLLOUT", index))


if __name__ == "__main__":
    main()
