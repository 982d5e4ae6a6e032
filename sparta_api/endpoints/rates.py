"""How fast and how many: the pace of requests per minute, and how many in flight an endpoint can use."""

from __future__ import annotations


class Pace:
    """A token bucket: at most `per_minute` units in any 60 seconds, at most a second's worth at once."""

    def __init__(self, per_minute: int) -> None:
        self._burst = max(1.0, per_minute / 60)
        self._rate = per_minute / 60 * (1 - min(0.5, self._burst / per_minute))
        self._level = 1.0
        self._filled = 0.0

    def delay(self, now: float, units: float) -> float:
        """Seconds until `units` may be taken; more than a burst is allowed once the bucket is full."""
        if not self._filled:
            self._filled = now
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate)
        self._filled = now
        return max(0.0, (min(units, self._burst) - self._level) / self._rate)

    def take(self, units: float) -> None:
        """Takes units; the level may fall below zero for a large request, which delays the next."""
        self._level -= units


class AutoLimit:
    """Finds how many requests in flight an endpoint can use.

    It doubles while throughput grows by it, then probes upwards in small steps, keeps a step that paid, takes
    back one that only made answers slower, and backs off by a factor when the server says 429 or 503. A doubling
    that does not pay is looked at twice, since servers have slow moments; steps that pay twice lead to doublings.
    """

    START = 8
    CEILING = 1024
    GAIN = 1.08
    """A doubling pays when it brings this much throughput."""
    BACKOFF = 0.75
    SETTLED_EPOCHS = 4

    def __init__(self) -> None:
        self.limit = self.START
        self._good = (0, 0.0)
        """The limit that paid last, and its throughput."""
        self._doubling = True
        self._doubted = False
        """Whether the present doubling did not pay at the first look."""
        self._paid = False
        """Whether the last step upwards paid."""
        self._rest = 0
        self._done = 0
        self._started: float | None = None
        self._starved = False
        self._echoes = 0
        """Answers and refusals still to come from requests that were in flight at the last step back."""

    def finished(self, now: float, waiting: bool) -> None:
        """A request ended; `waiting` tells whether more work was queued, so that the limit was what held."""
        self._echoes = max(0, self._echoes - 1)
        if self._started is None:
            self._started = now
            return
        self._done += 1
        self._starved = self._starved or not waiting
        if self._done < max(16, 3 * self.limit):
            return
        throughput = self._done / max(now - self._started, 1e-9)
        if not self._starved:
            self._judge(throughput)
        self._done, self._started, self._starved = 0, now, False

    def _judge(self, throughput: float) -> None:
        limit, best = self._good
        if limit == 0 or (self._doubling and throughput > best * self.GAIN):
            self._good = (self.limit, throughput)
            self.limit = min(self.CEILING, self.limit * 2)
        elif self._doubling and not self._doubted:
            self._doubted = True
            return
        elif self._doubling:
            self._doubling = False
            self.limit = max(limit, round(self.limit * self.BACKOFF))
            self._good = (self.limit, max(best, throughput))
            self._rest = self.SETTLED_EPOCHS
        elif self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self._good = (self.limit, throughput)
                self.limit = min(self.CEILING, self.limit + max(1, self.limit // 8))
        else:
            paid = throughput > best * (1 + (self.limit / limit - 1) / 2)
            self._doubling = paid and self._paid
            self._paid = paid
            self.limit = self.limit if paid else limit
            self._rest = 1 if paid else self.SETTLED_EPOCHS
        self._doubted = False

    def refused(self) -> None:
        """The server said that it has too much: one step back for all that are in flight at that moment."""
        if self._echoes:
            self._echoes -= 1
            return
        self._echoes = self.limit - 1
        self.limit = max(1, int(self.limit * self.BACKOFF))
        self._good = (self.limit, 0.0)
        self._doubling, self._rest = False, self.SETTLED_EPOCHS
        self._done, self._started, self._starved = 0, None, False
