"""What datatrove writes trains as it is."""

import json

import numpy as np
import pytest

from bpe.tokenizer import Tokenizer
from corpus.stream import TokenStream, find_shards
from tests.helpers import ROOT, log_of


def test_shards_of_datatroves_local_executor_train_as_they_are(train, tmp_path):
    for name in ("datatrove", "orjson"):  # pip install "datatrove[io,processing]"
        pytest.importorskip(name, reason="datatrove is not installed")
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    texts = (ROOT / "input.txt").read_text()[:40_000].split("\n\n")
    tokenizer = Tokenizer.train(texts, 384)
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for i in range(2):  # a file for each task, so that there is a split to train on, and one to validate
        lines = [json.dumps(dict(text=text, id=str(n))) + "\n" for n, text in enumerate(texts[i::2])]
        (tmp_path / "text" / f"{i}.jsonl").write_text("".join(lines))
    writer = DocumentTokenizer(
        str(tmp_path / "shards"), tokenizer_name_or_path=str(tmp_path / "tokenizer/tokenizer.json"),
        eos_token="<|endoftext|>", save_final_metadata=True, shuffle_documents=False,
    )  # fmt: skip
    reader = JsonlReader(str(tmp_path / "text"))
    LocalPipelineExecutor([reader, writer], tasks=2, workers=1, logging_dir=str(tmp_path / "logs")).run()
    stream = TokenStream(find_shards(str(tmp_path / "shards"), "train"), 384)
    ours = np.concatenate([[*tokenizer.encode_ordinary(text), tokenizer.eot_token] for text in texts[1::2]])
    assert stream.read(0, len(stream)).tolist() == ours.tolist()
    result = train(data=tmp_path / "shards", tokenizer=tmp_path / "tokenizer/tokenizer.json", max_steps=3)
    assert result.returncode == 0, result.stderr
    assert [r["step"] for r in log_of(tmp_path / "run", "train")] == [1, 2, 3]
