import numpy as np
import pytest

from rl.parameter_server.codecs import get_codec
from rl.parameter_server.errors import WeightsError
from rl.rollout.kv_cache.tiers.page_form import PageForm, StoredPage, split_pages, stack_pages
from tests.rl.rollout.kv_cache.tiers.pages import ARRAYS, NBYTES, assert_equal, page


@pytest.mark.parametrize("record", [False, True])
def test_a_page_comes_back(record: bool):
    form = PageForm(ARRAYS, get_codec("raw"))
    stored = form.pack(page(1, record=record))
    assert stored.intact
    assert form.nbytes == NBYTES <= len(stored.blob) <= NBYTES + 200
    assert_equal(form.unpack(stored.blob), page(1, record=record))


def test_a_lossy_codec_keeps_its_bound_and_the_record():
    form = PageForm(ARRAYS, get_codec("int8"))
    before = page(2, record=True)
    after = form.unpack(form.pack(before).blob)
    for a, b in zip(after.arrays, before.arrays, strict=True):
        assert 0 < np.abs(a - b).max() <= np.abs(b).max() / 254 * 1.001
    np.testing.assert_array_equal(after.record, before.record)


def test_damage_is_found():
    form = PageForm(ARRAYS, get_codec("raw"))
    stored = form.pack(page(3))
    for bit in (0, 77, 8 * len(stored.blob) - 1):
        changed = bytearray(stored.blob)
        changed[bit // 8] ^= 1 << bit % 8
        assert not StoredPage(bytes(changed), stored.checksum).intact
    for cut in (0, 3, 100, len(stored.blob) - 1):
        assert not StoredPage(stored.blob[:cut], stored.checksum).intact
        with pytest.raises(WeightsError):
            form.unpack(stored.blob[:cut])
    with pytest.raises(WeightsError):
        PageForm(ARRAYS[:1], form.codec).unpack(stored.blob)


def test_pages_are_stacked_and_split_again():
    pages = [page(seed, record=True) for seed in range(3)]
    stacked = stack_pages(pages, 4)
    assert [array.shape[0] for array in stacked] == [4, 4]
    assert not any(array[3].any() for array in stacked)
    for found, expected in zip(split_pages(stacked, 3, [one.record for one in pages]), pages, strict=True):
        assert_equal(found, expected)
