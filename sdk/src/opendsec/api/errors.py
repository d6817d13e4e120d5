"""Every error that may cross the wire, in one tree.

::

    PlatformError
    ├── RequestRefused        the request is at fault; the same request fails again
    │   ├── InvalidArgument · Unauthenticated · PermissionDenied · NotFound · Conflict
    │   ├── QuotaExceeded · UnsupportedCapability · PolicyDenied · ImageUnavailable
    ├── TryAgain              nothing happened; the same request may succeed later
    │   ├── CapacityUnavailable · Unavailable
    ├── LimitExceeded         a limit set for the sandbox or the call was reached
    │   ├── ExecTimeout (also a TimeoutError) · OutputLimit · OutOfMemory · DiskFull
    ├── SandboxLost           the sandbox cannot answer any more
    │   ├── SandboxGone · NodeLost · Preempted
    ├── OutcomeUnknown        the connection broke in the middle: it may or may not have happened
    │   └── WaitTimeout (also a TimeoutError)
    └── InternalFault         a defect of the platform
        └── Internal

A failed *command* is never an error: its exit code is data.
``is_infra`` tells whether the infrastructure is to blame, so that a trainer masks the sample instead of
scoring it zero.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An error as it crosses the wire."""

    code: str
    message: str
    retryable: bool
    is_infra: bool
    detail: dict[str, Any] = {}


class PlatformError(Exception):
    """Root of all errors of the platform.

    Attributes:
        code: stable machine-readable name.
        message: one lower-case sentence for the caller.
        detail: facts a program may use (limits, names, ``retry_after`` in seconds).
        retryable: the same request may succeed later, and it is certain that nothing happened.
        is_infra: the infrastructure failed, not the workload.
        http_status: status of the HTTP answer.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    is_infra: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def body(self) -> ErrorBody:
        """Return the error as it crosses the wire."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            is_infra=self.is_infra,
            detail=self.detail,
        )


class RequestRefused(PlatformError):
    """The request is at fault."""

    code = "invalid_argument"
    http_status = 400


class InvalidArgument(RequestRefused, ValueError):
    """An argument is malformed or out of range."""


class Unauthenticated(RequestRefused):
    """No valid API key came with the request."""

    code = "unauthenticated"
    http_status = 401


class PermissionDenied(RequestRefused, PermissionError):
    """The caller may not do this, or the file system refused it."""

    code = "permission_denied"
    http_status = 403

    # OSError's own __str__ would ignore the code.
    __str__ = PlatformError.__str__


class NotFound(RequestRefused, LookupError):
    """No such sandbox, exec, image, node or file."""

    code = "not_found"
    http_status = 404


class Conflict(RequestRefused):
    """The object is in a state that does not allow this."""

    code = "conflict"
    http_status = 409


class QuotaExceeded(RequestRefused):
    """A quota of the project is used up."""

    code = "quota_exceeded"
    http_status = 429


class UnsupportedCapability(RequestRefused):
    """The backend or this host cannot enforce what was asked; nothing degrades quietly."""

    code = "unsupported_capability"
    http_status = 422


class PolicyDenied(RequestRefused):
    """A policy forbids it."""

    code = "policy_denied"
    http_status = 403


class ImageUnavailable(RequestRefused):
    """The image or one of its layers is not in the store."""

    code = "image_unavailable"
    http_status = 404


class TryAgain(PlatformError):
    """Nothing happened; the same request may succeed later."""

    code = "unavailable"
    http_status = 503
    retryable = True
    is_infra = True


class CapacityUnavailable(TryAgain):
    """No node has room now; ``detail["retry_after"]`` is in seconds."""

    code = "capacity_unavailable"


class Unavailable(TryAgain):
    """A part of the platform does not answer now."""


class LimitExceeded(PlatformError):
    """A limit set for the sandbox or the call was reached."""

    code = "output_limit"
    http_status = 413


class ExecTimeout(LimitExceeded, TimeoutError):
    """The call did not end in time."""

    code = "exec_timeout"
    http_status = 408

    __str__ = PlatformError.__str__


class OutputLimit(LimitExceeded):
    """The answer is larger than allowed."""


class OutOfMemory(LimitExceeded):
    """The memory limit of the sandbox was hit."""

    code = "oom"
    http_status = 507


class DiskFull(LimitExceeded):
    """The disk limit of the sandbox, or the node's disk, is full."""

    code = "disk_full"
    http_status = 507


class SandboxLost(PlatformError):
    """The sandbox cannot answer any more."""

    code = "sandbox_gone"
    http_status = 410


class SandboxGone(SandboxLost):
    """The sandbox has ended; ``detail`` holds its cause and whether the infrastructure is to blame."""


class NodeLost(SandboxLost):
    """The node of the sandbox does not answer."""

    code = "node_lost"
    http_status = 503
    is_infra = True


class Preempted(SandboxLost):
    """The sandbox was taken away in favour of other work."""

    code = "preempted"
    is_infra = True


class OutcomeUnknown(PlatformError):
    """The connection broke in the middle, or an answer was lost: it may or may not have happened."""

    code = "outcome_unknown"
    http_status = 502
    is_infra = True


class WaitTimeout(OutcomeUnknown, TimeoutError):
    """The caller's own waiting time ran out; what it waited for may still happen."""

    code = "wait_timeout"
    http_status = 504


class InternalFault(PlatformError):
    """A defect of the platform."""

    is_infra = True


class Internal(InternalFault):
    """A defect of the platform; the log of the node says more."""


#: Leaf class of every code. A client looks a code up here, never by a name that the other side sent.
BY_CODE: dict[str, type[PlatformError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        Conflict,
        QuotaExceeded,
        UnsupportedCapability,
        PolicyDenied,
        ImageUnavailable,
        CapacityUnavailable,
        Unavailable,
        ExecTimeout,
        OutputLimit,
        OutOfMemory,
        DiskFull,
        SandboxGone,
        NodeLost,
        Preempted,
        OutcomeUnknown,
        WaitTimeout,
        Internal,
    )
}


def from_body(body: ErrorBody) -> PlatformError:
    """Rebuild an error from the wire; an unknown code becomes ``Internal``.

    What the sender says of this instance (``retryable``, ``is_infra``) wins over what holds for its class.
    """
    error = BY_CODE.get(body.code, Internal)(body.message)
    error.detail = dict(body.detail)
    error.__dict__.update(retryable=body.retryable, is_infra=body.is_infra)
    return error
