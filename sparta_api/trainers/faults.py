"""What a provider's failure means: the same request may work later, it never will, or the object is not there.

Both SDKs are generated alike: status errors carry `status_code`, `response` and `body`, all else derives from
a common base. Their own retries are off; `patiently` is the only one that repeats, and only what is idempotent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from sparta_api.secrets import scrub

TRANSIENT = frozenset({408, 409, 425, 429})
SPENT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
MESSAGE_LIMIT = 500


@dataclass
class ProviderFault(Exception):
    """A request that a provider did not fulfil. `transient` also means: it may have been carried out."""

    message: str
    status: int | None = None
    transient: bool = False
    wait: float | None = None
    """Seconds that the provider asked to wait."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}" if self.status else self.message


@dataclass(frozen=True)
class Pace:
    """How long things wait, in seconds."""

    poll: tuple[float, float] = (15, 60)
    """Between two looks at a job; the pause grows from the first to the second, with jitter."""
    file_poll: float = 3
    file_wait: float = 3600
    """How long a provider may take to check a file."""
    retry: float = 2
    """Before the second try of an idempotent request; doubled after each."""
    retries: int = 5
    look: float = 10
    """Between two looks for a job that may have been created."""
    looks: int = 6
    creates: int = 3
    max_wait: float = 300
    """A longer Retry-After stops instead."""
    unreachable: float = 900
    """How long a provider may be out of reach while a job runs there."""
    missing: float = 60
    """How long a new job may be unknown to its provider."""

    @classmethod
    def from_environment(cls) -> Pace:
        """The defaults, all times multiplied by SPARTA_TRAINING_PACE where that is set (rehearsals)."""
        factor = float(os.environ.get("SPARTA_TRAINING_PACE", "1"))
        base = cls()
        low, high = base.poll
        return cls(
            poll=(low * factor, high * factor),
            file_poll=base.file_poll * factor,
            retry=base.retry * factor,
            look=base.look * factor,
        )


class Sdk(Protocol):
    """The exception classes that the generated SDKs share (the modules themselves)."""

    @property
    def APIStatusError(self) -> Any:
        """An answer with an error status."""

    @property
    def APIConnectionError(self) -> Any:
        """No answer."""

    @property
    def APIError(self) -> Any:
        """The base of both, and of answers that cannot be read."""


async def asked(sdk: Sdk, call: Callable[[], Awaitable[Any]]) -> Any:
    """Awaits one request; every failure of the SDK becomes a `ProviderFault`."""
    try:
        return await call()
    except sdk.APIStatusError as error:
        raise from_status(error) from error
    except sdk.APIConnectionError as error:
        cause = error.__cause__ or error
        raise ProviderFault(scrub(f"no answer ({type(cause).__name__}: {cause})"), transient=True) from error
    except sdk.APIError as error:
        raise ProviderFault(scrub(f"an answer that cannot be read ({error})"), transient=True) from error


def from_status(error: Any) -> ProviderFault:
    """The fault of an answer with an error status, with the provider's own sentence."""
    status: int = error.status_code
    inner = error.body.get("error", error.body) if isinstance(error.body, dict) else error.body
    code = inner.get("code") if isinstance(inner, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else inner
    text = scrub(" ".join(str(message or error.message).split()))[:MESSAGE_LIMIT]
    transient = (status in TRANSIENT or status >= 500) and code not in SPENT
    return ProviderFault(text, status, transient, retry_after(error.response.headers))


def retry_after(headers: Any) -> float | None:
    """Seconds from Retry-After-Ms or Retry-After, None where neither is a number."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) / scale)
        except (KeyError, ValueError):
            continue
    return None


def raw(answer: Any) -> dict[str, Any]:
    """The JSON object of an SDK's answer, under the names that it has on the wire."""
    if not isinstance(answer, BaseModel):
        raise ProviderFault(f"an answer that is not JSON ({str(answer)[:80]!r})", transient=True)
    return answer.model_dump(mode="json", by_alias=True, warnings=False)


async def patiently(pace: Pace, call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeats an idempotent request while its faults are transient and the waits that are asked for bearable."""

    def again(error: BaseException) -> bool:
        return isinstance(error, ProviderFault) and error.transient and (error.wait or 0) <= pace.max_wait

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_for = error.wait if isinstance(error, ProviderFault) else None
        return asked_for if asked_for is not None else pace.retry * 2.0 ** (state.attempt_number - 1)

    async def attempt() -> Any:
        return await call()

    stop = stop_after_attempt(pace.retries)
    retrying = AsyncRetrying(retry=retry_if_exception(again), stop=stop, wait=wait, sleep=asyncio.sleep, reraise=True)
    return await retrying(attempt)
