"""The trainer side of vLLM's backend, with workers of plain tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from plain_engines import PlainEngines, PlainWorker

from starling.common.errors import WeightsError
from starling.weightsync.vllm.backend.sender import SenderOptions, WeightSender

DEADLINE_S = 60.0


class Model(torch.nn.Module):
    """Two layers, of which the second is tied to the first."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(size, 16))
        self.up = torch.nn.Linear(16, size)
        self.head = self.embed
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)


def empty(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return tensors like those of a model that a trainer publishes."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name != "head"}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def is_equal(tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> bool:
    """Say whether tensors hold a model's values, rounded to their element types."""
    values = model.state_dict()
    return all(torch.equal(tensor, values[name].to(tensor.dtype)) for name, tensor in tensors.items())


@contextmanager
def sending(source: Any, engines: PlainEngines, **options: Any) -> Iterator[WeightSender]:
    """Make a sender, and close it afterwards."""
    chosen = SenderOptions(**{"transport": "tcp", "deadline_s": DEADLINE_S, **options})
    sender = WeightSender(source, engines, options=chosen)
    try:
        yield sender
    finally:
        sender.close()
        engines.close()


def test_engines_hold_what_was_sent_under_its_version() -> None:
    model = Model()
    workers = [PlainWorker(f"worker {number}", empty(model)) for number in range(2)]
    engines = PlainEngines(*workers)
    with sending(model, engines) as sender:
        for version in (1, 2):
            torch.nn.init.normal_(model.up.weight)
            assert sender.send() == version
            assert all(is_equal(dict(worker.tensors), model) for worker in workers)
            assert engines.label == str(version)
    assert engines.calls == ["init", *["start", "update", "finish"] * 2]


def test_generation_goes_on_until_the_switch() -> None:
    model = Model()
    worker = PlainWorker("worker 0", empty(model))
    engines = PlainEngines(worker)
    with sending(model, engines) as sender:
        sender.stage()
        assert engines.calls == ["init"]
        assert not is_equal(dict(worker.tensors), model)
        before = Model()
        before.load_state_dict(model.state_dict())
        torch.nn.init.normal_(model.up.weight)  # training goes on
        sender.switch()
        assert is_equal(dict(worker.tensors), before)


def test_worker_without_staging_pulls_when_it_switches() -> None:
    model = Model()
    worker = PlainWorker("worker 0", empty(model), stages=False)
    with sending(model, PlainEngines(worker)) as sender:
        sender.stage()
        assert not is_equal(dict(worker.tensors), model)
        sender.switch()
        assert is_equal(dict(worker.tensors), model)


def test_few_changes_travel_as_deltas() -> None:
    model = Model(size=4096)
    worker = PlainWorker("worker 0", empty(model))
    with sending(model, PlainEngines(worker), delta_versions=2) as sender:
        sender.send()
        with torch.no_grad():
            model.up.weight.view(-1)[::100] += 1
        sender.send()
        assert is_equal(dict(worker.tensors), model)
        assert sender.report is not None
        (report,) = sender.report.pulls.values()
        assert report.num_deltas > 0
        assert sum(report.bytes_by_source.values()) < report.size_bytes / 10


def test_engine_gets_its_own_element_type() -> None:
    model = Model()
    worker = PlainWorker("worker 0", empty(model, torch.bfloat16))
    with sending(model, PlainEngines(worker)) as sender:
        sender.send()
        assert is_equal(dict(worker.tensors), model)


def test_engines_of_equal_layouts_pull_from_each_other() -> None:
    model = Model()
    workers = [PlainWorker(f"worker {number}", empty(model)) for number in range(3)]
    with sending(model, PlainEngines(*workers), relay_from_mb=0.0) as sender:
        for _ in range(2):
            torch.nn.init.normal_(model.up.weight)
            sender.send()
            assert all(is_equal(dict(worker.tensors), model) for worker in workers)
        assert sender.report is not None
        sources = [{*report.bytes_by_source} for report in sender.report.pulls.values()]
        assert len(set.union(*sources)) > 1, "all workers read from the trainer alone"


def test_engine_that_goes_while_it_relays_costs_the_others_no_version() -> None:
    model = Model()
    workers = [PlainWorker(f"worker {number}", empty(model), engine=f"engine {number // 2}") for number in range(6)]
    engines = PlainEngines(*workers)
    with sending(model, engines, relay_from_mb=0.0) as sender:
        sender.send()
        before = Model()
        before.load_state_dict(model.state_dict())
        torch.nn.init.normal_(model.up.weight)
        assert workers[0].weights is not None
        workers[0].weights.announced = lambda: workers[0].session._link.close()  # type: ignore[union-attr]
        sender.stage()
        assert sender.report is not None
        assert {*sender.report.lost} == {"worker 0", "worker 1"}, "all workers of one engine"
        assert {*sender.report.pulls} == {worker.name for worker in workers[2:]}
        engines.workers = tuple(workers[2:])
        for _ in range(2):
            sender.switch()
            assert all(is_equal(dict(worker.tensors), model) for worker in workers[2:])
            assert all(is_equal(dict(worker.tensors), before) for worker in workers[:2])
            torch.nn.init.normal_(model.up.weight)
            sender.stage()
            assert not sender.report.lost
        engines.workers = tuple(workers)
        sender.join()
        sender.send()
        assert all(is_equal(dict(worker.tensors), model) for worker in workers)


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("notices", [True, False])
def test_engine_that_was_lost_switches_none_of_its_workers(gone: int, notices: bool) -> None:
    model = Model()
    pair = [PlainWorker(f"worker {number}", empty(model), engine="engine 0") for number in range(2)]
    other = PlainWorker("worker 2", empty(model), engine="engine 1")
    engines = PlainEngines(*pair, other)
    with sending(model, engines) as sender, ExitStack() as stack:
        sender.join()
        if not notices:  # as where the connection of the others ends later than vLLM calls them
            stack.enter_context(blind(pair[1 - gone]))
        close_after_pull(pair[gone])
        sender.stage()
        assert sender.report is not None
        assert {*sender.report.lost} == {"worker 0", "worker 1"}
        with pytest.raises(WeightsError, match=r"The trainer has lost this engine"):
            sender.switch()
        assert not engines.label
        assert is_equal(dict(other.tensors), model)
        assert all(not tensor.any() for worker in pair for tensor in worker.tensors.values())
        engines.workers = (other,)
        torch.nn.init.normal_(model.up.weight)
        assert sender.send() == 2
        assert engines.label == "2"
        assert is_equal(dict(other.tensors), model)
        assert all(not tensor.any() for worker in pair for tensor in worker.tensors.values())


@contextmanager
def blind(worker: PlainWorker) -> Iterator[None]:
    """Have a worker notice the end of its connection only afterwards."""
    link, sees = worker.session._link, threading.Event()  # type: ignore[union-attr]
    receive = link.receive

    def receive_later(*arguments: Any) -> Any:
        try:
            return receive(*arguments)
        except WeightsError:
            sees.wait(DEADLINE_S)
            raise

    link.receive = receive_later  # type: ignore[method-assign]
    yield
    sees.set()


def close_after_pull(worker: PlainWorker) -> None:
    """Have a worker end its connection instead of saying that it has pulled."""
    assert worker.weights is not None
    pull = worker.weights.pull

    def pull_and_go(*arguments: Any, **named: Any) -> Any:
        report = pull(*arguments, **named)
        worker.session._link.close()  # type: ignore[union-attr]
        return report

    worker.weights.pull = pull_and_go  # type: ignore[method-assign]


def test_engine_that_goes_after_its_pull_is_named_before_any_switches() -> None:
    model = Model()
    workers = [PlainWorker(f"worker {number}", empty(model)) for number in range(2)]
    engines = PlainEngines(*workers)
    with sending(model, engines) as sender:
        sender.stage()
        workers[0].session._link.close()  # type: ignore[union-attr]
        assert sender._rendezvous is not None
        end = time.monotonic() + DEADLINE_S
        while len(sender._rendezvous.workers) == 2:
            assert time.monotonic() < end, "the trainer does not notice"
            time.sleep(0.01)
        with pytest.raises(WeightsError, match=r"^worker 0 has gone: start its engine again, and call join\(\)\.$"):
            sender.switch()
        assert engines.calls == ["init"]


def test_engine_of_which_not_all_workers_join_is_named() -> None:
    model = Model()
    pair = [PlainWorker(f"worker {number}", empty(model), engine="engine 0", engine_size=2) for number in range(2)]
    engines = PlainEngines(*pair)
    with sending(model, engines) as sender:
        engines.workers = (pair[0],)
        with pytest.raises(WeightsError, match=r"Only 1 of the 2 workers of worker 0's engine have joined"):
            sender.join()
        engines.workers = tuple(pair)
        sender.join()
        sender.send()
        assert all(is_equal(dict(worker.tensors), model) for worker in pair)


def test_workers_of_a_lost_engine_are_forgotten_together() -> None:
    model = Model()
    pair = [PlainWorker(f"worker {number}", empty(model), engine="engine 0", engine_size=2) for number in range(2)]
    other = PlainWorker("worker 2", empty(model), engine="engine 1")
    engines = PlainEngines(*pair, other)
    with sending(model, engines) as sender:
        sender.send()
        pair[0].close()
        with pytest.raises(WeightsError, match=r"^worker 0 has gone: start its engine again"):
            sender.stage()
        engines.workers = (other,)
        sender.join()
        torch.nn.init.normal_(model.up.weight)
        sender.send()
        assert is_equal(dict(other.tensors), model)


def test_call_that_fails_is_an_error_also_where_all_workers_have_switched() -> None:
    model = Model()
    engines = PlainEngines(PlainWorker("worker 0", empty(model)))
    with sending(model, engines) as sender:
        sender.stage()
        engines.fails = True
        with pytest.raises(WeightsError, match=r"^Version 1 was not adopted: OSError: another engine is gone\.$"):
            sender.switch()
        assert not engines.label


def test_trainer_whose_last_engine_goes_is_told() -> None:
    model = Model()
    worker = PlainWorker("worker 0", empty(model))
    with sending(model, PlainEngines(worker)) as sender:
        sender.join()
        assert worker.weights is not None
        pull = worker.weights.pull

        def pull_and_go(*arguments: Any, **named: Any) -> Any:
            worker.session._link.close()  # type: ignore[union-attr]
            return pull(*arguments, **named)

        worker.weights.pull = pull_and_go  # type: ignore[method-assign]
        with pytest.raises(WeightsError, match=r"^worker 0 has gone: "):
            sender.send()


def test_engine_joins_again_after_it_was_replaced() -> None:
    model = Model()
    engines = PlainEngines(PlainWorker("worker 0", empty(model)))
    with sending(model, engines) as sender:
        sender.send()
        engines.close()
        engines.workers = (PlainWorker("worker 1", empty(model)),)
        with pytest.raises(WeightsError, match=r"^worker 0 has gone: start its engine again, and call join\(\)\.$"):
            sender.send()
        sender.join()
        sender.send()
        assert is_equal(dict(engines.workers[0].tensors), model)


def test_wrong_model_is_named() -> None:
    model = Model()
    worker = PlainWorker("worker 0", {**empty(model), "extra": torch.zeros(2)})
    with (
        sending(model, PlainEngines(worker)) as sender,
        pytest.raises(WeightsError, match=r"another model than the trainer's.*Tensor extra of worker 0 is unknown"),
    ):
        sender.join()


def test_changed_config_is_named() -> None:
    model: Any = Model()
    model.config = {"rope_parameters": {"rope_theta": 1e6}, "transformers_version": "5"}
    worker = PlainWorker("worker 0", empty(model), config={"rope_parameters": {"rope_theta": 1e4, "extra": 1}})
    with (
        sending(model, PlainEngines(worker)) as sender,
        pytest.raises(WeightsError, match=r"rope_parameters.rope_theta = 10000\.0, and the trainer's .* 1000000\.0"),
    ):
        sender.join()


def test_other_version_of_vllm_is_named() -> None:
    model = Model()
    workers = PlainWorker("worker 0", empty(model)), PlainWorker("worker 1", empty(model), vllm="vllm 0.33.0")
    with (
        sending(model, PlainEngines(*workers)) as sender,
        pytest.raises(WeightsError, match=r"worker 1 cannot join: it runs vllm 0\.33\.0, and worker 0 runs vllm 0\.32"),
    ):
        sender.join()


def test_unsupported_version_of_vllm_is_named() -> None:
    model = Model()
    worker = PlainWorker("worker 0", empty(model), vllm="vllm 0.12.0")
    with (
        sending(model, PlainEngines(worker)) as sender,
        pytest.raises(WeightsError, match=r"it runs vllm 0\.12\.0, and vllm >=0\.32,<0\.34 is supported"),
    ):
        sender.join()


def test_engine_without_the_backend_is_named() -> None:
    with (
        sending(Model(), PlainEngines()) as sender,
        pytest.raises(WeightsError, match=r"No worker of vLLM has joined the trainer.*weight-transfer-config"),
    ):
        sender.join()


def test_engine_that_holds_something_else_is_named() -> None:
    model = Model()
    worker = PlainWorker("worker 0", empty(model))
    engines = PlainEngines(worker)
    with sending(model, engines) as sender:
        sender.join()
        assert worker.weights is not None
        worker.weights.spoil = lambda: worker.tensors["scale"].add_(1)  # type: ignore[func-returns-value]
        with pytest.raises(WeightsError, match="worker 0 does not hold what was sent"):
            sender.send()
        assert engines.calls[-1] == "finish", "vLLM would refuse the next update"
        assert not engines.label
        worker.weights.spoil = lambda: None
        sender.send()
        assert is_equal(dict(worker.tensors), model)


def test_nothing_is_switched_to_what_was_not_staged() -> None:
    model = Model()
    with sending(model, PlainEngines(PlainWorker("worker 0", empty(model)))) as sender:
        sender.join()
        with pytest.raises(WeightsError, match="No version is staged"):
            sender.switch()


def test_source_that_would_gather_is_refused() -> None:
    with (
        sending(iter(()), PlainEngines(PlainWorker("worker 0", empty(Model())))) as sender,
        pytest.raises(WeightsError, match=r"^source is a tuple_iterator, expected a torch.nn.Module"),
    ):
        sender.join()
