"""Every published model has as many parameters as published, counted without allocating any."""

import jax
import pytest

from axlearn_like.layers.base import build_abstract, split
from mesh.errors import UserError
from models.catalog import FAMILIES, published_model

NAMES = [name for family in FAMILIES.values() for name in family.names]

# Llama and Qwen: sums over the tensors of the published safetensors files (a tied head counted once). Llama 2 and the
# others: as transformers 5.23 counts them for the published `config.json` files; of Gemma 3 from 4B on the text model.
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen2-0.5B": 494_032_768,
    "Qwen2-1.5B": 1_543_714_304,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2-72B": 72_706_203_648,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "QwQ-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_620_634_112,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-4B": 3_880_263_168,
    "Gemma-3-12B": 11_766_034_176,
    "Gemma-3-27B": 27_009_346_304,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.2": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-12B": 12_247_782_400,
    "Mistral-Small-24B": 23_572_403_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "GPT-2-124M": 124_439_808,
    "GPT-2-355M": 354_823_168,
    "GPT-2-774M": 774_030_080,
    "GPT-2-1.5B": 1_557_611_200,
    "DeepSeek-V3": 671_026_419_200,  # with the 58 x 256 biases of its routers, and without the second prediction
    "DeepSeek-R1": 671_026_419_200,
}


def size_of(name: str) -> str:
    """Return the name in `PUBLISHED`: an Instruct model has the tensors of its base model."""
    return name.removesuffix("-Instruct")


@pytest.mark.parametrize("name", NAMES)
def test_every_model_of_the_catalog_has_the_published_number_of_parameters(name: str):
    cfg = published_model(name)
    assert cfg.dtype == "bfloat16"
    assert sum(leaf.size for leaf in jax.tree.leaves(split(build_abstract(cfg))[1])) == PUBLISHED[size_of(name)]


def test_every_published_number_is_of_a_model_of_the_catalog():
    assert len(NAMES) == len(set(NAMES))
    assert PUBLISHED.keys() == {size_of(name) for name in NAMES}


def test_a_wrong_name_is_answered_with_the_nearest_of_all_families():
    with pytest.raises(UserError, match=r"no published model 'Qwen2.5-72b'; did you mean 'Qwen2.5-72B"):
        published_model("Qwen2.5-72b")
