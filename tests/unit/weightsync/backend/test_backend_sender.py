"""The trainer side of vLLM's backend, with workers of plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        for _ in range(2):
            sender.switch()
            assert all(is_equal(dict(worker.tensors), model) for worker in workers[2:])
            for worker in workers[:2]:
                assert is_equal(dict(worker.tensors), before), "an engine never holds two versions"
                assert "There is no connection to the trainer" in worker.error
            torch.nn.init.normal_(model.up.weight)
            sender.stage()
            assert not sender.report.lost
        sender.join()
        sender.send()
        assert all(is_equal(dict(worker.tensors), model) for worker in workers)


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
