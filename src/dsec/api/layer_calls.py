"""What the OpenAPI document says of layers, environments and builds."""

from __future__ import annotations

from typing import get_args, get_type_hints

from dsec.api.builds import BuildLine
from dsec.api.calls import JSON, NDJSON, OCTETS, Call
from dsec.api.layers import (
    CollectRequest,
    EnvironmentDetails,
    EnvironmentRequest,
    ImportRequest,
    LayerList,
    MergeRequest,
    Reader,
    Readers,
    Step,
    UploadArguments,
)
from dsec.builder.packages import PackagesRequest
from dsec.builder.service import BuildOptions
from dsec.store.environments import Environment
from dsec.store.service import LayerInfo

TAR = "application/x-tar"
_LAYER = "/v1/layers/{reference}"
_ENVIRONMENT = "/v1/environments/{name}"
_UPLOAD = {
    name: get_args(kind)[0] if type(None) in get_args(kind) else kind
    for name, kind in get_type_hints(UploadArguments, include_extras=True).items()
} | {"reader": Reader | Readers}
"""Several readers are said one by one: in a query a list of one is the same as that one."""

CALLS = (
    Call(method="get", path="/v1/layers", summary="Layers that the project may read", gives=(JSON, LayerList)),
    Call(
        method="get",
        path=_LAYER,
        summary="One layer, by NAME@VERSION (`/` in it is %2F) or digest",
        gives=(JSON, LayerInfo),
    ),
    Call(method="delete", path=_LAYER, summary="Forget a layer's name"),
    Call(
        method="post",
        path=f"{_LAYER}/verify",
        summary="Read all of a layer and compare it with its digests; a line a step, the result last",
        gives=(NDJSON, Step),
    ),
    Call(method="get", path=f"{_LAYER}/export", summary="A layer as a tar archive", gives=(TAR, None)),
    Call(
        method="post",
        path="/v1/layers:import",
        summary="Make an environment of a registry's image; a line a step, the result last",
        takes=((JSON, ImportRequest),),
        gives=(NDJSON, Step),
    ),
    Call(
        method="post",
        path="/v1/layers:upload",
        summary="A layer of a tree, or an environment of an image, in a tar archive; a line a step, the result last",
        arguments=_UPLOAD,
        required=("name",),
        takes=((TAR, None), (OCTETS, None)),
        gives=(NDJSON, Step),
    ),
    Call(
        method="post",
        path="/v1/layers:packages",
        summary="Make a layer of Debian packages: a whole base, or what they add to an environment; a line a step, "
        "the result last",
        takes=((JSON, PackagesRequest),),
        gives=(NDJSON, Step),
    ),
    Call(
        method="post",
        path="/v1/layers:merge",
        summary="Make one layer of several; a line a step, the result last",
        takes=((JSON, MergeRequest),),
        gives=(NDJSON, Step),
    ),
    Call(
        method="post",
        path="/v1/layers:gc",
        summary="Delete layers without a name that no sandbox stands on, of all projects: for keys of the project "
        "`default`; a line a step, the result last",
        takes=((JSON, CollectRequest),),
        gives=(NDJSON, Step),
    ),
    Call(
        method="post",
        path="/v1/environments",
        summary="Make or replace an environment",
        takes=((JSON, EnvironmentRequest),),
        example={"name": "scratch-tools", "layers": []},
        gives=(JSON, Environment),
        statuses=(201,),
    ),
    Call(method="get", path=_ENVIRONMENT, summary="One environment, with its layers", gives=(JSON, EnvironmentDetails)),
    Call(method="delete", path=_ENVIRONMENT, summary="Forget an environment; its layers stay"),
    Call(
        method="post",
        path="/v1/builds",
        summary="Make an environment of a Dockerfile; the body is a tar archive of its context; a line a line of "
        "the log, the result last",
        arguments={"options": BuildOptions},
        required=("options",),
        takes=((TAR, None), (OCTETS, None)),
        gives=(NDJSON, BuildLine),
    ),
)
