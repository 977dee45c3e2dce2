"""Pages that have left the device: in host memory, the least recently used of them on a local disk.

A thread copies pages from the device, encodes them, writes and reads the file. The engine's own thread looks pages up,
and waits only for those that it needs now. Pages are found by digest (page_digests.py) and verified by checksum; one
that is damaged or lost in between is computed again.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import takewhile

from axlearn_like.config import ConfigBase, Configurable
from rl.parameter_server.codecs import TensorCodec, get_codec
from rl.parameter_server.errors import WeightsError
from rl.rollout.kv_cache.tiers.costs import Tier, TransferCosts
from rl.rollout.kv_cache.tiers.disk_tier import DiskTier
from rl.rollout.kv_cache.tiers.page_form import Page, PageForm, StoredPage

# Pages that left the device, came back from each tier, were computed again as that costs less, were damaged, found no
# room, or could not be written to the disk; and the bytes that came back.
COUNTS = ("spilled", "hits_host", "hits_disk", "recomputed", "damaged", "dropped", "failed_writes", "returned_bytes")


class HostTiers(Configurable):
    """Host memory and disk below a pool of pages; `form` must be set before the first page arrives."""

    class Config(ConfigBase["HostTiers"]):
        host_bytes: int = 1 << 30  # bytes of pages in host memory
        disk: str | None = None  # folder for the file of pages that host memory has no room for; None: there is none
        disk_bytes: int = 1 << 33  # bytes of that file at most
        codec: str = "raw"  # encoding of pages: raw or delta are exact; int8, bf16, ecsq and hevc are approximate

        @property
        def tags(self) -> tuple[str, ...]:
            """Approximations of rollouts over such pages."""
            codec = self._known_codec()
            return () if codec.lossless else (f"{codec.name}-pages",)

        def check_fields(self) -> None:
            """Refuse sizes and codecs that no pages can have."""
            self.require_least(1, "host_bytes", "disk_bytes")
            expected = "a codec without a base, as pages have none: raw, or with loss bf16, int8, ecsq or hevc"
            self.require("codec", not self._known_codec().needs_base, expected)

        def _known_codec(self) -> TensorCodec:
            with self.errors_in("codec"):
                return get_codec(self.codec)

    def __init__(self, cfg: Config):
        """Open the file, if there is one (UserError: it cannot be made, or there is no such codec)."""
        self._cfg = cfg
        self.codec = get_codec(cfg.codec)
        self.form = PageForm((), self.codec)  # arrays of the engine's pages
        self.costs = TransferCosts()
        self._disk = None if cfg.disk is None else DiskTier(cfg.disk, cfg.disk_bytes)
        self._memory: OrderedDict[bytes, StoredPage] = OrderedDict()  # least recently used first
        self._coming: dict[bytes, Future[None]] = {}  # copies under way
        self._held, self._in_flight, self._epoch = 0, 0, 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-tiers")

    def wants(self, digest: bytes) -> bool:
        """Return True if a page that leaves the device is worth copying: it is not here yet, and there is room."""
        with self._lock:
            if digest in self._memory:
                self._memory.move_to_end(digest)
                return False
            if digest in self._coming or (self._disk is not None and digest in self._disk):
                return False
            page = self.form.nbytes
            if self._in_flight + page > self._cfg.host_bytes:
                self._counts["dropped"] += 1
                return False
            self._in_flight += page
            return True

    def put(self, digests: Items[bytes], read: Callable[[], list[Page]]) -> None:
        """Take pages that `wants` has said yes to; `read` gives them, and waits for the device in another thread."""
        with self._lock:
            future = self._thread.submit(self._take, list(digests), read, self._epoch)
            self._coming.update(dict.fromkeys(digests, future))

    def _take(self, digests: list[bytes], read: Callable[[], list[Page]], epoch: int) -> None:
        kept = 0
        try:
            for digest, page in zip(digests, read(), strict=True):
                with suppress(WeightsError, MemoryError):  # infinities, as int8 has none: it is computed again
                    self._insert(digest, self.form.pack(page), epoch)
                    kept += 1
        finally:
            self._count("spilled", kept)
            self._count("dropped", len(digests) - kept)
            with self._lock:
                self._in_flight -= len(digests) * self.form.nbytes
                for digest in digests:
                    self._coming.pop(digest, None)

    def add(self, pages: Iterable[tuple[bytes, StoredPage]]) -> None:
        """Take pages that another engine has encoded; returns when they are in."""
        with self._lock:
            epoch = self._epoch
        self._thread.submit(lambda: [self._insert(*one, epoch) for one in pages]).result()

    def _insert(self, digest: bytes, page: StoredPage, epoch: int) -> None:
        """Keep a page, and move the least recently used ones on; called in the thread."""
        with self._lock:
            if epoch != self._epoch:
                return
            if digest not in self._memory:
                self._memory[digest] = page
                self._held += len(page.blob)
        while (oldest := self._pop_beyond_room()) is not None:
            if self._disk is None:
                self._count("dropped")
            elif oldest[0] not in self._disk and not self._disk.write(*oldest):
                self._count("failed_writes")

    def _pop_beyond_room(self) -> tuple[bytes, StoredPage] | None:
        with self._lock:
            if self._held + self._in_flight <= self._cfg.host_bytes or not self._memory:
                return None
            digest, page = self._memory.popitem(last=False)
            self._held -= len(page.blob)
            return digest, page

    def known(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the digests up to the first whose page is not here."""
        with self._lock:
            return list(takewhile(lambda one: self._tier(one) is not None, digests))

    def prefetch(self, digests: Items[bytes]) -> None:
        """Begin to read pages from the disk into host memory."""
        with self._lock:
            lacking = [one for one in digests if self._tier(one) == "disk"]
            if lacking:
                self._thread.submit(self._load, lacking, self._epoch)

    def fetch(self, digests: Items[bytes], page_size: int) -> list[Page]:
        """Return pages up to the first that is lost or damaged; none where computing them again costs less."""
        began = time.monotonic()
        with self._lock:
            places = [self._tier(one) or "host" for one in digests]
            page = self._held // max(len(self._memory), 1) or self.form.nbytes
            sizes: dict[Tier, int] = {tier: places.count(tier) * page for tier in ("host", "disk")}
            if not self.costs.pays(len(digests) * page_size, sizes):
                self._counts["recomputed"] += len(digests)
                return []
            coming = {future for one in digests if (future := self._coming.get(one)) is not None}
        wait(coming)
        read = self._read(digests)
        found = [page for _, page in takewhile(lambda one: one[1] is not None, zip(digests, read, strict=True))]
        pages = [page for page in found if page is not None]
        for tier in ("host", "disk"):
            count = places[: len(pages)].count(tier)
            self._count(f"hits_{tier}", count)
        if pages:
            slowest: Tier = "disk" if "disk" in places else "host"
            nbytes, seconds = len(pages) * page, time.monotonic() - began
            self.costs.brought(slowest, len(pages) * page_size, nbytes, seconds)
            self._count("returned_bytes", nbytes)
        return pages

    def _read(self, digests: Items[bytes]) -> list[Page | None]:
        """Return pages verified and decoded, with None for what is lost; touched so that the first are used last."""
        with self._lock:
            held = {one: page for one in reversed(digests) if (page := self._memory.get(one)) is not None}
            for one in held:
                self._memory.move_to_end(one)
            lacking, epoch = [one for one in digests if one not in held], self._epoch
        if lacking and self._disk is not None:
            held |= self._thread.submit(self._load, lacking, epoch).result()
        return [self._verified(one, held.get(one)) for one in digests]

    def _load(self, digests: list[bytes], epoch: int) -> dict[bytes, StoredPage]:
        """Read pages from the disk into host memory; called in the thread."""
        assert self._disk is not None
        found = {one: page for one in digests if (page := self._disk.read(one)) is not None}
        for digest, page in reversed(found.items()):
            self._insert(digest, page, epoch)
        return found

    def _verified(self, digest: bytes, page: StoredPage | None) -> Page | None:
        if page is None:
            return None
        if page.intact:
            try:
                return self.form.unpack(page.blob)
            except MemoryError:
                self._count("dropped")
                return None
            except WeightsError:
                pass
        self._count("damaged")
        self._discard(digest)
        return None

    def _discard(self, digest: bytes) -> None:
        with self._lock:
            if (page := self._memory.pop(digest, None)) is not None:
                self._held -= len(page.blob)
        if self._disk is not None:
            self._thread.submit(self._disk.forget, digest).result()

    def _tier(self, digest: bytes) -> Tier | None:
        if digest in self._memory or digest in self._coming:
            return "host"
        return "disk" if self._disk is not None and digest in self._disk else None

    def stored(self, digests: Items[bytes]) -> list[StoredPage | None]:
        """Return the intact bytes of pages, for another engine; None: it is lost or damaged."""
        self.settle()
        with self._lock:
            held, epoch = {one: self._memory[one] for one in digests if one in self._memory}, self._epoch
        if self._disk is not None:
            lacking = [one for one in digests if one not in held]
            held |= self._thread.submit(self._load, lacking, epoch).result()
        return [page if (page := held.get(one)) is not None and page.intact else None for one in digests]

    def settle(self) -> None:
        """Wait until all that was begun is done."""
        self._thread.submit(lambda: None).result()

    def clear(self) -> None:
        """Forget all pages: the weights have changed."""
        with self._lock:
            self._epoch += 1
            self._memory.clear()
            self._held = 0
        if self._disk is not None:
            self._thread.submit(self._disk.clear).result()

    def stats(self) -> dict[str, float]:
        """Return pages by what happened to them, bytes by tier, and the seconds that hits have saved."""
        with self._lock:
            return {
                **{f"tier_{name}": self._counts[name] for name in COUNTS},
                "tier_host_bytes": self._held,
                "tier_disk_bytes": 0 if self._disk is None else self._disk.used,
                "tier_seconds_saved": self.costs.seconds_saved,
            }

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by
