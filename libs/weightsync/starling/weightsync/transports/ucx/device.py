"""Memory of devices in UCX: which kinds a context can send and receive, and its registration.

UCXX's Python layer has neither, so libucp is called by the handles that UCXX gives.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.device_handles import location_of

HOST, CUDA = "cpu", "cuda"
_TYPES: Final = {HOST: 0, CUDA: 1}  # ucs_memory_type_t
_MEMORY_TYPES: Final = 1 << 2  # UCP_ATTR_FIELD_MEMORY_TYPES
_ADDRESS_LENGTH_AND_TYPE: Final = 0b10011


class _ContextAttributes(ctypes.Structure):
    """The beginning of ``ucp_context_attr_t``."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("request_bytes", ctypes.c_size_t),
        ("thread_mode", ctypes.c_int),
        ("memory_types", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("counter_bytes", ctypes.c_size_t),
    )


class _MapParameters(ctypes.Structure):
    """``ucp_mem_map_params_t``."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("rights", ctypes.c_uint),
        ("memory_type", ctypes.c_int),
        ("exported", ctypes.c_void_p),
    )


def memory_kinds(context: int) -> frozenset[str]:
    """Return the kinds of memory that a context can send and receive, ``cpu`` always among them."""
    attributes = _ContextAttributes(field_mask=_MEMORY_TYPES)
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_context_query
    except (OSError, AttributeError):
        return frozenset({HOST})
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_ContextAttributes))
    query.restype = ctypes.c_int8
    known = 0 if query(context, ctypes.byref(attributes)) != 0 else int(attributes.memory_types)
    return frozenset({HOST, *(kind for kind, number in _TYPES.items() if known >> number & 1)})


def register(context: int, memory: Any, kind: str) -> int:
    """Register memory with the devices of a context. Return what `unregister` takes.

    Args:
        context: of `memory_kinds`, which has this kind.
        memory: flat bytes, an array or a tensor of a device.
        kind: of the memory.

    Raises:
        WeightsError: a device cannot register it.
    """
    address, num_bytes = location_of(memory)
    parameters = _MapParameters(
        field_mask=_ADDRESS_LENGTH_AND_TYPE, address=address, length=num_bytes, memory_type=_TYPES[kind]
    )
    mapped = ctypes.c_void_p()
    call = ctypes.CDLL("libucp.so.0").ucp_mem_map
    call.argtypes = (ctypes.c_void_p, ctypes.POINTER(_MapParameters), ctypes.POINTER(ctypes.c_void_p))
    call.restype = ctypes.c_int8
    code = call(context, ctypes.byref(parameters), ctypes.byref(mapped))
    if code != 0 or mapped.value is None:
        raise WeightsError(f"UCX cannot register {num_bytes} bytes of {kind!r} memory (status {code}).")
    return mapped.value


def unregister(context: int, mapped: int) -> None:
    """Undo `register`; the memory is still there."""
    call = ctypes.CDLL("libucp.so.0").ucp_mem_unmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_int8
    call(context, mapped)


def exposed(memory: Any) -> Any:
    """Return memory as UCXX takes it: an array of the host, or a tensor of a device.

    Raises:
        WeightsError: it is not flat bytes, which UCXX would silently misinterpret.
    """
    interface = getattr(memory, "__cuda_array_interface__", None)
    if interface is not None:
        if len(interface["shape"]) != 1 or interface["typestr"] != "|u1" or interface.get("strides"):
            raise WeightsError(f"UCX moves flat bytes, not {interface['typestr']} {interface['shape']} of a device.")
        return memory
    array = np.asarray(memory)
    if array.dtype != "u1" or array.ndim != 1 or not array.flags.c_contiguous:
        raise WeightsError(f"UCX moves flat bytes, not {array.dtype} {array.shape} with strides {array.strides}.")
    return array
