"""Sources, sampling and batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from flex_trainer.data import DataConfig, SamplingConfig, build_dataset, byte_tokenizer
from flex_trainer.data.collate import CausalCollator
from flex_trainer.data.stdlib import stdlib_documents

TOKENIZER = byte_tokenizer()


def decode(tokens) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of four files."""
    root = tmp_path / "lib"
    for name, text in {
        "codec.py": '"""' + "Words about codecs. " * 5 + '"""\n' + "x = 1\n" * 20,
        "site-packages/other.py": "installed = 1\n" * 20,
        "encodings/table.py": "'\\x00' # 0x00 -> NULL\n" * 20,
        "pydoc_data/topics.py": "topics = {'for': '" + "A loop takes items. " * 5 + "'}\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_stdlib_domains_are_separate(library: Path) -> None:
    code = list(stdlib_documents("code", 0, library))
    prose = list(stdlib_documents("prose", 0, library))
    data = list(stdlib_documents("data", 0, library))
    assert len(code) == 2
    assert any("x = 1" in text for text in code)
    assert not any("installed" in text for text in code)
    assert any("Words about codecs." in text for text in prose)
    assert any("A loop takes items." in text for text in prose)
    assert not any("x = 1" in text for text in prose)
    assert data == ["'\\x00' # 0x00 -> NULL\n" * 20]


@pytest.mark.parametrize("domain", ["code", "prose", "data"])
def test_this_interpreter_has_every_domain(domain: str) -> None:
    documents = stdlib_documents(domain, 0)
    num_characters = 0
    while num_characters < 100_000:
        num_characters += len(next(documents))
    assert num_characters >= 100_000


def test_order_depends_on_the_seed_alone() -> None:
    def first(seed: int) -> list[str]:
        return [text for text, _ in zip(stdlib_documents("data", seed), range(5), strict=False)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def make(sequence_length: int = 64, num_samples: int = 40, batch_size: int = 2, seed: int = 0, **sampling):
    config = DataConfig(
        name="stdlib",
        domains=("code", "data"),
        sequence_length=sequence_length,
        sampling=SamplingConfig(**sampling),
        seed=seed,
    )
    return build_dataset(config, TOKENIZER, batch_size, num_samples)


def test_same_config_same_samples() -> None:
    first, second, other = make(lengths="skewed"), make(lengths="skewed"), make(lengths="skewed", seed=1)
    assert [sample.tolist() for sample in first.samples] == [sample.tolist() for sample in second.samples]
    assert [sample.tolist() for sample in first.samples] != [sample.tolist() for sample in other.samples]


def test_fixed_lengths() -> None:
    dataset = make(lengths="fixed")
    assert len(dataset) == 40
    assert {len(sample) for sample in dataset.samples} == {64}
    assert dataset.num_tokens == 40 * 64


def test_uniform_lengths_vary_per_micro_batch() -> None:
    dataset = make(lengths="uniform", num_samples=200)
    lengths = [len(sample) for sample in dataset.samples]
    assert lengths[::2] == lengths[1::2]  # both samples of a micro-batch
    assert len(set(lengths)) > 20
    assert min(lengths) >= 8 and max(lengths) <= 64


def test_skewed_lengths_are_mostly_short() -> None:
    dataset = make(lengths="skewed", num_samples=800)
    lengths = Counter(len(sample) for sample in dataset.samples[::2])
    assert set(lengths) == {8, 16, 24, 32, 48, 64}
    assert lengths[8] > lengths[24] > lengths[64] > 0
    assert lengths[64] < 0.1 * sum(lengths.values())


def test_a_full_length_that_is_no_multiple_of_eight_is_reached() -> None:
    assert max(len(sample) for sample in make(sequence_length=65, lengths="skewed", num_samples=400).samples) == 65


def test_blocked_domains_come_in_runs() -> None:
    dataset = make(domains="blocked", block=5, num_samples=200)
    runs = [dataset.domains[start : start + 10] for start in range(0, 200, 10)]  # 5 micro-batches of 2
    assert all(len(set(run)) == 1 for run in runs)
    assert {run[0] for run in runs} == {"code", "data"}
    assert len(set(make(domains="mixed").domains[:20])) == 2


def files(tmp_path: Path, *names: str, **changes) -> DataConfig:
    return DataConfig(files=tuple(str(tmp_path / name) for name in names), sequence_length=16, **changes)


def test_text_is_cut_without_loss(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    (tmp_path / "b.txt").write_text("0123456789")
    dataset = build_dataset(files(tmp_path, "a.txt", "b.txt"), TOKENIZER)
    assert [len(sample) for sample in dataset.samples] == [16, 16, 6]  # 26 + 10 bytes and two ends of sequence
    assert "".join(decode(sample) for sample in dataset.samples) == "abcdefghijklmnopqrstuvwxyz0123456789"
    assert dataset.samples[1].tolist()[10] == TOKENIZER.eos_token_id


def test_jsonl_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"body": "first row"}, {"body": "second row"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"body": "third row"}]), tmp_path / "b.parquet")
    dataset = build_dataset(files(tmp_path, "a.jsonl", "b.parquet", text_column="body"), TOKENIZER)
    assert "".join(decode(sample) for sample in dataset.samples) == "first rowsecond rowthird row"
    with pytest.raises(ValueError, match=r"has no column 'bodi' \(text_column\); did you mean 'body'"):
        build_dataset(files(tmp_path, "a.jsonl", text_column="bodi"), TOKENIZER)


def test_named_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is a name that needs no network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.jsonl").write_text('{"text": "hello"}\n')
    config = DataConfig(name=str(tmp_path / "corpus"), sequence_length=16)
    assert decode(build_dataset(config, TOKENIZER).samples[0]) == "hello"
    with pytest.raises(ValueError, match="split 'dev'"):
        build_dataset(DataConfig(name=str(tmp_path / "corpus"), split="dev"), TOKENIZER)


@pytest.mark.parametrize("content", ["", '{"text": ""}\n{"text": ""}\n'])
def test_nothing_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl' yields nothing to train on"):
        build_dataset(files(tmp_path, "empty.jsonl"), TOKENIZER)


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(ValueError, match="does not exist"):
        build_dataset(files(tmp_path, "no.txt"), TOKENIZER)
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(ValueError, match="unknown kind"):
        build_dataset(files(tmp_path, "a.doc"), TOKENIZER)
    (tmp_path / "bad.parquet").write_text("this is no parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet' cannot be read as parquet"):
        build_dataset(files(tmp_path, "bad.parquet"), TOKENIZER)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt' is not text in UTF-8"):
        build_dataset(files(tmp_path, "latin.txt"), TOKENIZER)
    (tmp_path / "numbers.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match="holds int, but text is needed"):
        build_dataset(files(tmp_path, "numbers.jsonl"), TOKENIZER)


def test_collator_pads_and_ignores_padding() -> None:
    batch = CausalCollator(pad_token_id=0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["input_ids"].dtype == torch.long


def test_items_are_what_the_collator_takes() -> None:
    dataset = make(lengths="skewed", num_samples=4, batch_size=4)
    batch = CausalCollator(0)([dataset[index] for index in range(4)])
    assert batch["input_ids"].shape == (4, len(dataset.samples[0]))
    assert torch.equal(batch["labels"], batch["input_ids"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "stdlib", "num_samples": 0}, "num_samples=0"),
        ({"name": "stdlib", "num_eval_samples": -1}, "num_eval_samples=-1"),
        ({"files": ("a.txt",), "domains": ("code",)}, "only apply to name: stdlib"),
    ],
)
def test_config_values(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)
    with pytest.raises(ValueError, match="block=0"):
        SamplingConfig(block=0)
