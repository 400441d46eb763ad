"""Our declarations of XLA's C interface (bind/xla_frame.h) are those of the headers that jaxlib brings."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import ROOT

OURS_AND_THEIRS = {
    "Extension": ("XLA_FFI_Extension_Base", {"struct_size": "struct_size", "type": "type", "next": "next"}),
    "ApiVersion": (
        "XLA_FFI_Api_Version",
        {"extensions": "extension_start", "major": "major_version", "minor": "minor_version"},
    ),
    "ErrorToCreate": (
        "XLA_FFI_Error_Create_Args",
        {"extensions": "extension_start", "message": "message", "code": "errc"},
    ),
    "Api": (
        "XLA_FFI_Api",
        {"version": "api_version", "internal": "internal_api", "create_error": "XLA_FFI_Error_Create"},
    ),
    "Buffer": (
        "XLA_FFI_Buffer",
        {"extensions": "extension_start", "type": "dtype", "data": "data", "rank": "rank", "dims": "dims"},
    ),
    "Buffers": ("XLA_FFI_Args", {"extensions": "extension_start", "size": "size", "kinds": "types", "buffers": "args"}),
    "CallFrame": (
        "XLA_FFI_CallFrame",
        {
            "extensions": "extension_start",
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "arguments": "args",
            "results": "rets",
        },
    ),
    "Metadata": ("XLA_FFI_Metadata", {"version": "api_version", "traits": "traits"}),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", {"base": "extension_base", "metadata": "metadata"}),
}
WHOLE = (
    "Extension",
    "ApiVersion",
    "ErrorToCreate",
    "Buffer",
    "Buffers",
    "MetadataExtension",
)  # the others may end earlier
CONSTANTS = {
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kBufferKind": "XLA_FFI_ArgType_BUFFER",
    "kOldestVersion.major": "XLA_FFI_API_MAJOR",
    "Code::kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "Code::kDeadlineExceeded": "XLA_FFI_Error_Code_DEADLINE_EXCEEDED",
    "Code::kFailedPrecondition": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "Code::kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "Type::kBool": "XLA_FFI_DataType_PRED",
    "Type::kInt8": "XLA_FFI_DataType_S8",
    "Type::kUint8": "XLA_FFI_DataType_U8",
    "Type::kInt32": "XLA_FFI_DataType_S32",
    "Type::kInt64": "XLA_FFI_DataType_S64",
    "Type::kFloat32": "XLA_FFI_DataType_F32",
    "Type::kFloat64": "XLA_FFI_DataType_F64",
}


def program():
    lines = ["#include <cstddef>", '#include "xla/ffi/api/c_api.h"', '#include "bind/xla_frame.h"']
    for ours, (theirs, members) in OURS_AND_THEIRS.items():
        name = f"envfleet::xla::{ours}"
        for own, other in members.items():
            lines += [f"static_assert(offsetof({name}, {own}) == offsetof({theirs}, {other}));"]
            lines += [f"static_assert(sizeof({name}::{own}) <= sizeof({theirs}::{other}));"]
        if ours in WHOLE:
            lines += [f"static_assert(sizeof({name}) == sizeof({theirs}));"]
    lines += ["static_assert(sizeof(XLA_FFI_Rets) == sizeof(XLA_FFI_Args));"]
    lines += ["static_assert(int{XLA_FFI_RetType_BUFFER} == int{XLA_FFI_ArgType_BUFFER});"]
    lines += [f"static_assert(int(envfleet::xla::{ours}) == int({theirs}));" for ours, theirs in CONSTANTS.items()]
    return "\n".join(lines) + "\n"


def compiled(text):
    jaxlib = pytest.importorskip("jaxlib")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    headers = Path(jaxlib.__file__).parent / "include"
    command = [compiler, "-std=c++20", "-fsyntax-only", "-I", ROOT / "native", "-isystem", headers, "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def test_the_declarations_are_those_of_jaxlib():
    done = compiled(program())
    assert done.returncode == 0, done.stderr


def test_a_difference_would_be_found():
    text = program().replace("xla::Buffer, dims) == offsetof(XLA_FFI_Buffer, dims)", "xla::Buffer, dims) == 0")
    assert "static assertion failed" in compiled(text).stderr
