import numpy as np

from rl.rollout.kv_cache.page_pool import PagePool
from rl.rollout.kv_cache.prefix_cache import PrefixCache
from rl.rollout.kv_cache.tiers.page_digests import chain


def test_a_digest_depends_on_the_key_and_on_every_token_before_its_end():
    tokens = np.arange(12, dtype=np.int32)
    plain = list(chain((3, None), tokens, 4))
    assert len(set(plain)) == 3 and plain[:2] == list(chain((3, None), tokens[:11], 4))
    for place in range(12):
        other = tokens.copy()
        other[place] += 1
        found = list(chain((3, None), other, 4))
        assert [a == b for a, b in zip(found, plain, strict=True)] == [page < place // 4 for page in range(3)]
    for key in ((4, None), (3, ("a", 1))):
        assert not set(chain(key, tokens, 4)) & set(plain)


def test_the_prefix_cache_evicts_under_the_names_of_the_chain():
    pool, evicted = PagePool(10), {}
    cache = PrefixCache(pool, 2, lambda page, digest, record: evicted.update({page: (digest, record)}))
    rows = [np.array(row, np.int32) for row in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [9, 9])]
    held = {}
    for row in rows:
        pages = pool.allocate(len(row) // 2)
        records = [np.array([page]) for page in pages]
        cache.insert((5, None), row, pages, records)
        held |= dict(zip(chain((5, None), row, 2), pages, strict=True)) if not held else {}
        pool.release(pages)
    for row in rows[1:]:
        held |= dict(zip(chain((5, None), row, 2), cache.match((5, None), row), strict=True))
        pool.release(cache.match((5, None), row) + [held[one] for one in chain((5, None), row, 2)])
    assert cache.evict(10) == len(held) == 5
    assert {digest: page for page, (digest, _) in evicted.items()} == held
    assert all(record == [page] for page, (_, record) in evicted.items())
