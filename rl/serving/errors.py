"""Errors in the form of OpenAI's protocol."""

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A response other than 200.

    Attributes:
        status: HTTP status.
        param: the field of the request that is at fault.
        code: a word for client programs.
        retry_after: seconds after which another attempt may succeed.
        partial: choices that were complete or begun when a deadline passed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        partial: list[dict[str, Any]] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.partial = retry_after, partial

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error if self.partial is None else {**error, "partial": self.partial}}


def bad_field(param: str, message: str) -> ApiError:
    """Return a 400 whose message begins with the field's name."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
