"""Calls between the process of a program and the process of its tests, over a socket.

The tests of a data set contain what they expect, so they run in another session than the program that they test. There
a name that only the program has stands for its function or object: plain values (numbers, texts, lists, ...) are
copied, and everything else is a `RemoteObject`, whose operations take place in the program's process.

The program's process may send anything. What arrives at the tests is JSON, from which nothing but plain values and
references is made; and whether two references are equal is decided without asking the program, which could say yes.
"""

from __future__ import annotations

import builtins
import json
import operator
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

FRAME_BYTES: Final = 64 << 20
"""A longer message is the end of the conversation."""
_HELLO: Final = b"h"
_LENGTH: Final = struct.Struct("<Q")
_TEXT_CHARS: Final = 1000
"""Of an exception."""
_MUTABLE: Final = (list, dict, set, bytearray, deque)
_SMALL: Final = 1 << 62
"""Larger integers are written as hexadecimal digits, whose number is not limited."""
_BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: getattr(operator, name) for name in (*_BINARY, "neg", "getitem", "setitem", "delitem", "contains")},
    "getattr": getattr, "setattr": setattr, "len": len, "bool": bool, "iter": iter, "next": next, "str": str,
    "repr": repr,
}  # fmt: skip


class ProgramEnded(BaseException):
    """The program has ended, or sent what is no message. No `except Exception` of a test takes it for its answer."""


class RaisedError(Exception):
    """The program has raised an exception of a class that Python itself does not have."""


class Peer:
    """One of the two ends of a conversation: asks the other one, and answers it while waiting.

    Args:
        line: the socket of this end.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._names: Mapping[str, Any] | None = None
        """Of the program; None at the end of the tests, which lets the other one call what it was passed, only."""
        self._own: list[Any] = []
        """Objects that the other end has references to."""
        self._numbers: dict[int, int] = {}
        """Their indices, by `id`."""
        self._others: dict[int, RemoteObject] = {}

    def say_hello(self) -> None:
        """Tell the other end that this one is there."""
        self._line.sendall(_HELLO)

    def await_hello(self) -> bool:
        """Wait until the other end is there; return whether it is."""
        return self._line.recv(1) == _HELLO

    def serve(self, names: Mapping[str, Any]) -> None:
        """Answer requests for a program with these names, until the other end closes."""
        self._names = names
        while True:
            try:
                request = self._receive()
            except ProgramEnded:
                return
            self._answer(request)

    def get(self, name: str) -> Any:
        """Return what the program calls `name`. Raises NameError if it has no such name."""
        return self._ask(["get", name])

    def call(self, target: RemoteObject, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a function of the other end, and make the changes to the arguments that it makes."""
        encoded = [self._encode(one) for one in arguments]
        return self._ask(["call", self._encode(target), encoded, self._encode(dict(named))], arguments)

    def operate(self, operation: str, target: RemoteObject, *arguments: Any) -> Any:
        """Carry out one of `_OPERATIONS` on an object of the other end."""
        return self._ask(["operate", operation, [self._encode(one) for one in (target, *arguments)]])

    def _ask(self, request: list[Any], arguments: Sequence[Any] = ()) -> Any:
        self._send(request)
        while True:
            match self._receive():
                case ["ok", value, [*changed]]:
                    self._change(arguments, changed)
                    return self._decode(value)
                case ["raised", str(name), str(text)]:
                    raise _raised(name, text)
                case request:
                    self._answer(request)

    def _change(self, arguments: Sequence[Any], changed: list[Any]) -> None:
        for one in changed:
            match one:
                case [int(index), new] if 0 <= index < len(arguments):
                    _replace(arguments[index], self._decode(new))
                case _:
                    raise ProgramEnded("this is no change of an argument")

    def _answer(self, request: Any) -> None:
        try:
            reply = ["ok", *self._perform(request)]
        except ProgramEnded:
            raise
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            reply = ["raised", type(error).__name__, str(error)[:_TEXT_CHARS]]
        self._send(reply)

    def _perform(self, request: Any) -> tuple[Any, list[Any]]:
        """Return the encoded result of a request, and which of its arguments it has changed."""
        match request:
            case ["call", target, [*encoded], named]:
                arguments = [self._decode(one) for one in encoded]
                result = self._encode(self._decode(target)(*arguments, **self._decode(named)))
                mutable = ((index, one) for index, one in enumerate(arguments) if type(one) in _MUTABLE)
                after = ((index, self._encode(one)) for index, one in mutable)
                return result, [[index, one] for index, one in after if one != encoded[index]]
            case ["get", str(name)] if self._names is not None:
                return self._encode(_find(self._names, name)), []
            case ["operate", str(operation), [*encoded]] if self._names is not None:
                return self._encode(_OPERATIONS[operation](*(self._decode(one) for one in encoded))), []
        raise ProgramEnded("this is no request")

    # --- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: list[Any]) -> None:
        body = json.dumps(message).encode()
        if len(body) > FRAME_BYTES:
            raise ProgramEnded(f"a message of {len(body)} bytes is longer than {FRAME_BYTES}")
        try:
            self._line.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ProgramEnded(f"the other end has gone ({error})") from None

    def _receive(self) -> Any:
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > FRAME_BYTES:
                raise ProgramEnded(f"a message of {length} bytes is longer than {FRAME_BYTES}")
            return json.loads(self._read(length))
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise ProgramEnded(f"there is no message ({error})") from None

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            received = self._line.recv(min(length - len(data), 1 << 20))
            if not received:
                raise ProgramEnded("the other end has gone")
            data += received
        return bytes(data)

    # --- values --------------------------------------------------------------------------------------------------

    def _encode(self, value: Any) -> Any:
        """Return JSON for a value: itself, or a list of a letter and its parts."""
        if value is None or isinstance(value, bool | str):
            return value if value is None or isinstance(value, bool) else str(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int):
            return int(value) if abs(value) < _SMALL else ["i", hex(value)]
        if type(value) in _PLAIN_LETTERS or isinstance(value, dict | tuple):
            return self._encode_parts(value)
        if isinstance(value, RemoteObject):
            return ["yours", _number_of(value)]
        if callable(convert := getattr(value, "tolist", None)) and type(value).__module__.startswith("numpy"):
            return self._encode(convert())
        return self._refer(value)

    def _encode_parts(self, value: Any) -> Any:
        if isinstance(value, dict):
            return ["d", [[self._encode(key), self._encode(one)] for key, one in value.items()]]
        if isinstance(value, bytes | bytearray):
            return [_PLAIN_LETTERS[type(value)], value.hex()]
        if isinstance(value, complex):
            return ["c", [value.real, value.imag]]
        if isinstance(value, range):
            return ["r", [self._encode(one) for one in (value.start, value.stop, value.step)]]
        return [_PLAIN_LETTERS.get(type(value), "t"), [self._encode(one) for one in value]]

    def _refer(self, value: Any) -> Any:
        if self._names is None and not callable(value):
            raise TypeError(f"a test cannot pass a {type(value).__name__} to the program")
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._own)
            self._own.append(value)  # so that its `id` stays its own
        return ["mine", number]

    def _decode(self, encoded: Any) -> Any:
        try:
            return self._decoded(encoded)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise ProgramEnded(f"this is no value ({error})") from None

    def _decoded(self, encoded: Any) -> Any:
        match encoded:
            case None | bool() | int() | float() | str():
                return encoded
            case ["i", str(digits)]:
                return int(digits, 16)
            case ["d", [*pairs]]:
                return {self._decoded(key): self._decoded(value) for key, value in pairs}
            case ["b" | "B" as letter, str(digits)]:
                return _MAKE[letter](bytes.fromhex(digits))
            case ["c", [float() | int() as real, float() | int() as imaginary]]:
                return complex(real, imaginary)
            case ["r", [start, stop, step]]:
                return range(*(self._decoded(one) for one in (start, stop, step)))
            case ["l" | "t" | "s" | "f" | "q" as letter, [*parts]]:
                return _MAKE[letter](self._decoded(one) for one in parts)
            case ["mine", int(number)]:
                return self._others.setdefault(number, RemoteObject(self, number))
            case ["yours", int(number)] if number >= 0:
                return self._own[number]
        raise ValueError("an unknown form")


_PLAIN_LETTERS: Final[dict[type, str]] = {
    list: "l", tuple: "t", set: "s", frozenset: "f", deque: "q", bytes: "b", bytearray: "B", complex: "c", range: "r",
    dict: "d",
}  # fmt: skip
_MAKE: Final[dict[str, Callable[[Any], Any]]] = {
    "l": list, "t": tuple, "s": set, "f": frozenset, "q": deque, "b": bytes, "B": bytearray,
}  # fmt: skip


class RemoteObject:
    """An object in the process of the other end."""

    __slots__ = ("_of", "_that")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_of", peer)
        object.__setattr__(self, "_that", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._of.call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._of.operate("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._of.operate("setattr", self, name, value)

    def __iter__(self) -> Any:
        return self._of.operate("iter", self)

    def __next__(self) -> Any:
        return self._of.operate("next", self)

    def __len__(self) -> int:
        return int(self._of.operate("len", self))

    def __bool__(self) -> bool:
        return bool(self._of.operate("bool", self))

    def __str__(self) -> str:
        return str(self._of.operate("str", self))

    def __repr__(self) -> str:
        return str(self._of.operate("repr", self))


def _forward(operation: str) -> Callable[..., Any]:
    def forwarded(self: RemoteObject, *arguments: Any) -> Any:
        return self._of.operate(operation, self, *arguments)

    return forwarded


for _name in (*_BINARY, "neg", "getitem", "setitem", "delitem", "contains"):
    setattr(RemoteObject, f"__{_name.strip('_')}__", _forward(_name))


class Names(dict[str, Any]):
    """Names of the code of tests: its own, those of Python, and else those of the program.

    So a program cannot replace what the tests take from Python, as `sorted`.
    """

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        try:
            return self._peer.get(name)
        except NameError:
            raise KeyError(name) from None


def _find(names: Mapping[str, Any], name: str) -> Any:
    """Return what a program calls `name`: also a method of its class `Solution`."""
    if name in names:
        return names[name]
    solution = names.get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"name {name!r} is not defined by the program")


def _number_of(value: RemoteObject) -> int:
    number: int = object.__getattribute__(value, "_that")
    return number


def _raised(name: str, text: str) -> BaseException:
    """Return the exception for one that the program has raised."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        return RaisedError(f"{name}: {text}")
    if not issubclass(kind, Exception):  # SystemExit, KeyboardInterrupt
        return ProgramEnded(f"it raised {name}: {text}")
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError needs more
        return RaisedError(f"{name}: {text}")


def _replace(old: Any, new: Any) -> None:
    """Make the content of a changed argument that of its copy."""
    if isinstance(old, list | bytearray) and isinstance(new, list | bytearray):
        old[:] = new
    elif isinstance(old, dict) and isinstance(new, dict):
        old.clear()
        old.update(new)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old |= new
    elif isinstance(old, deque) and isinstance(new, deque):
        old.clear()
        old.extend(new)
