"""The address of memory, without numpy, which takes longer to import than all that a writer needs."""

from __future__ import annotations

import ctypes
import mmap


class _Buffer(ctypes.Structure):
    """`Py_buffer`, the same in all versions of Python: https://docs.python.org/3/c-api/buffer.html."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def memory_address(memory: memoryview | mmap.mmap) -> int:
    """The address of the first byte of contiguous memory, which may be read-only.  ValueError if it is
    closed."""
    buffer = _Buffer()
    python = ctypes.pythonapi
    python.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(buffer), 0)  # PyBUF_SIMPLE
    try:
        return buffer.buf or 0
    finally:
        python.PyBuffer_Release(ctypes.byref(buffer))
