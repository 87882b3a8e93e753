"""Routes of Cosmos-RL's reward service: `enqueue` and `pull` for its clients, `push` for reward workers.

A client sends the media of a batch with `enqueue`, gets a uuid, and pulls each type of reward until it is there: 400
says that it is not yet. What fails is a result, too, with `scores` of null and an `error`, so that no client waits for
it in vain.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from starling.reward.core.media import Input
from starling.reward.http.body import take_body
from starling.reward.http.cosmos.enqueue import MAX_LINE_BYTES
from starling.reward.http.cosmos.forms import FORM, MAX_FIELDS, MAX_NAME_CHARACTERS, read_form, short_field
from starling.reward.http.cosmos.kept import KeptInfo, read_kept
from starling.reward.http.cosmos.latents import read_attributes
from starling.reward.http.cosmos.pushed import PushedScores
from starling.reward.http.cosmos.request import INPUT_INFO, PUSHED, Enqueued, KnownTypes, needs_text, read_enqueue
from starling.reward.http.cosmos.results import problems_of, render, render_failure
from starling.reward.http.errors import REFUSALS, HttpError, Responses, UnreadableResult
from starling.reward.http.schema import memory_of
from starling.reward.http.stores.store import FinishedRequest, RequestBody
from starling.reward.http.table import RETRY_AFTER_S, RequestTable
from starling.reward.score.workers.shared import MediaMemory, TooManyBuffersError

log = structlog.get_logger(__name__)

PREFIX: Final = "/api/reward"
BODY_FORM: Final = "cosmos"
"""Form of the bodies of `enqueue` in a store."""
DEFAULT_TYPE: Final = "dance_grpo"
"""Of a pull that names none."""
REPLICA_VARIABLE: Final = "LEPTON_REPLICA_ID"
"""Environment variable with the name by which a gateway tells replicas apart (header `X-Lepton-Replica-Target`)."""
PUSHED_UNTIL: Final = "pushed_until"
"""Key of what is kept with a request: until when scores may be pushed, in seconds since 1970."""
MAX_FORM_BYTES: Final = 64 << 10
MAX_PUSH_BYTES: Final = 4 << 20
_NOT_READY: Final[Responses] = {400: {"description": "no scores yet, or no such uuid"}}
_NOT_EXPECTED: Final[Responses] = {404: {"description": "no request waits for a push of this type"}}


@dataclass(frozen=True)
class CosmosService:
    """What the routes need.

    Args:
        table: the requests.
        labels: of the scorers, in the order of the settings.
        scorers: indices of the scorers by the types that name them.
        memory: takes the media of requests.
        pushed: the scores that reward workers push.
        inputs: returns what each scorer reads; None if that is not known yet.
        replica_id: the name of this replica for a gateway; empty without one.
    """

    table: RequestTable
    labels: Sequence[str]
    scorers: Mapping[str, int]
    memory: MediaMemory
    pushed: PushedScores
    inputs: Callable[[], Sequence[Input | None]]
    replica_id: str = ""

    @property
    def types(self) -> KnownTypes:
        """What a request may ask for."""
        shown = sorted({*self.labels, *self.pushed.types})
        of_texts = {name for name, index in self.scorers.items() if self.reads_texts(index)}
        return KnownTypes(self.scorers, self.pushed.types, shown, of_texts)

    def reads_texts(self, scorer: int) -> bool:
        """Whether a scorer is known to read completions only, which have no text here."""
        inputs = self.inputs()
        return bool(inputs) and inputs[scorer] == "text"

    def read(self, data: bytes, id: str) -> Enqueued:
        """Read the body of `enqueue`. Raises HttpError."""
        try:
            return read_enqueue(data, id, self.types, self.memory)
        except TooManyBuffersError as error:
            raise HttpError(429, f"{error}; try again", retry_after_s=RETRY_AFTER_S) from None


def scorers_by_type(scorers: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the indices of scorers by the types that name them: their labels, and names that only one has.

    Args:
        scorers: label and name of each.
    """
    names = [name for _, name in scorers]
    by_name = {name: index for index, name in enumerate(names) if names.count(name) == 1}
    return {**by_name, **{label: index for index, (label, _) in enumerate(scorers)}}


def cosmos_routes(service: CosmosService) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix=PREFIX, tags=["Cosmos-RL"], responses=REFUSALS)
    _add_scoring(router, service)
    _add_push(router, service)
    _add_greetings(router)
    return router


def _add_scoring(router: APIRouter, service: CosmosService) -> None:
    """Add the routes by which clients send media and get scores."""

    @router.post("/enqueue", openapi_extra=_body("application/octet-stream", {"type": "string", "format": "binary"}))
    async def enqueue(request: Request) -> Response:
        """Score the media after the first line of the body, which is JSON; the answer has the uuid to pull with."""
        id = await _enqueue(service, await take_body(request))
        replica = {"replica_id": service.replica_id} if service.replica_id else {}
        return JSONResponse({"uuid": id, **replica})

    @router.post("/pull", responses=_NOT_READY, openapi_extra=_form("uuid", type="type"))
    async def pull(request: Request) -> Response:
        """Return the scores of one type, as often as asked for; 400 while they are not there."""
        fields = await _fields(request, "uuid")
        id, type = short_field(fields, "uuid"), short_field(fields, "type") or DEFAULT_TYPE
        document = service.pushed.find(id, type) or await _document(service, id, type)
        if document is None:
            return JSONResponse({"message": f"Not found scores for {id}"}, 400)
        return Response(document, media_type="application/json")


def _add_push(router: APIRouter, service: CosmosService) -> None:
    """Add the route by which reward workers give scores."""

    @router.post("/push", responses=_NOT_EXPECTED, openapi_extra=_form("uuid", "scores", "type"))
    async def push(request: Request) -> Response:
        """Give the scores of a type of `reward.http.pushed_types`; those that come first count."""
        fields = await _fields(request, "uuid", "scores", "type")
        service.pushed.put(short_field(fields, "uuid"), short_field(fields, "type"), fields["scores"])
        return JSONResponse({"message": "Scores received and stored successfully"})


def _add_greetings(router: APIRouter) -> None:
    """Add the routes that clients call before they send media."""

    @router.post("/ping", openapi_extra=_form("info_data"))
    async def ping(request: Request) -> Response:
        """Say that the service answers."""
        await _fields(request, "info_data")
        return JSONResponse({"message": "Ping request received"})

    @router.post("/latent_attr", openapi_extra=_form("fields"))
    async def latent_attr(request: Request) -> Response:
        """Check attributes of latents; the decoder is that of the settings, and stays."""
        attributes = read_attributes((await _fields(request, "fields"))["fields"])
        log.info("latent_attributes", announced=attributes.names)
        return JSONResponse({"message": "Latent attributes set successfully"})


def body_limits(max_media_bytes: int) -> dict[tuple[str, str], int]:
    """Return the limits on the bodies of the routes, in bytes, by method and path."""
    limits = dict.fromkeys(("pull", "ping", "latent_attr"), MAX_FORM_BYTES)
    limits |= {"push": MAX_PUSH_BYTES, "enqueue": max_media_bytes}
    return {("POST", f"{PREFIX}/{name}"): limit for name, limit in limits.items()}


async def _enqueue(service: CosmosService, data: bytes) -> str:
    """Add the request in the body of `enqueue` to the table; returns its id. Raises HttpError."""
    line_bytes = memory_of(data[: max(0, data.find(b"\n", 0, MAX_LINE_BYTES + 1))])
    id = str(uuid.uuid4())
    async with service.table.reading(len(data) + line_bytes):
        # In a thread: the others are not to wait for it.
        found = await asyncio.to_thread(service.read, data, id)
    info = {**found.info, PUSHED_UNTIL: time.time() + service.pushed.timeout_s}
    num_bytes = line_bytes + found.request.media_bytes
    service.pushed.expect(id, info[PUSHED], len(found.request.samples), info[INPUT_INFO])
    try:
        await service.table.add(found.request, num_bytes, RequestBody(BODY_FORM, data), info)
    except BaseException:
        service.pushed.forget(id)
        raise
    return id


async def _fields(request: Request, *required: str) -> dict[str, str]:
    return read_form(await take_body(request), request.headers.get("content-type", ""), required)


async def _document(service: CosmosService, id: str, type: str) -> bytes | None:
    """Return the document of a type that scorers give; None while there is none. Raises HttpError."""
    try:
        finished = await service.table.result(id, 0.0)
    except UnreadableResult as error:  # the table has logged it
        return render_failure(type, {}, str(error))
    except HttpError as error:
        if error.status != 404:
            raise
        return None  # clients do not tell an unknown uuid from one that is not ready
    if finished is None:
        return None
    try:
        kept = read_kept(finished.info)
    except ValueError as error:
        log.warning("stored_result_refused", id=id, reason=str(error))
        return render_failure(type, {}, problems_of(finished.result) or str(UnreadableResult(id)))
    return _rendered(service, finished, kept, type)


def _rendered(service: CosmosService, finished: FinishedRequest, kept: KeptInfo, type: str) -> bytes | None:
    if type in kept.types:
        index = service.scorers.get(type)
        if index is not None and service.reads_texts(index):  # which was not known at `enqueue`
            return render_failure(type, kept.input_info, f"{needs_text(type)}.")
        label = type if index is None else service.labels[index]
        return render(finished, type, label, kept.input_info)
    if type not in kept.pushed:
        asked = ", ".join([*kept.types, *kept.pushed])
        return render_failure(type, kept.input_info, f"the request did not ask for {type!r}; it asked for {asked}.")
    if time.time() < kept.pushed_until:
        return None
    return render_failure(type, kept.input_info, "no reward worker has pushed scores in time.")


def _form(*required: str, **optional: str) -> dict[str, Any]:
    short = {"type": "string", "maxLength": MAX_NAME_CHARACTERS}
    properties = {
        name: short if name in ("uuid", "type") else {"type": "string"} for name in (*required, *optional.values())
    }
    schema = {"type": "object", "properties": properties, "required": list(required), "maxProperties": MAX_FIELDS}
    return _body(FORM, schema)


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}
