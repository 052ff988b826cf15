"""A real instruction-tuned LLM and real questions for the tests that need them, and a tiny LLM of random weights."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import Prompter

SHARED = Path(os.environ.get("CALM_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Directory of SmolLM2-135M-Instruct in Hugging Face form."""
    if "SMOLLM2_DIR" in os.environ:
        return Path(os.environ["SMOLLM2_DIR"])
    tool = SHARED / "tools" / "make_smollm2.py"
    if not tool.is_file():
        pytest.fail("this test needs SmolLM2-135M-Instruct: set SMOLLM2_DIR to a directory that holds its config.json, "
                    "model.safetensors and tokenizer.json (HuggingFaceTB/SmolLM2-135M-Instruct)")
    directory = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, tool, directory], check=True)
    return directory


@pytest.fixture(scope="session")
def questions():
    """Function: "mmlu" or "opentrivia" -> path of that file of real questions."""
    def path(name):
        file = SHARED / "data" / f"{name}.jsonl.gz"
        if not file.is_file():
            pytest.fail(f"this test needs {file.name}: JSON lines of question, choices, answer, subject made from "
                        "hendrycks/test (MMLU) or uberspot/OpenTriviaQA, in the folder data/ of $CALM_SHARED")
        return file
    return path


@pytest.fixture
def model_dir(tmp_path):
    """Function: settings, template, letters -> Prompter of a directory with a byte-level tokenizer that has no merges:
    every byte is a token, so " A" is two and "A" is one. A beginning-of-sequence token <s> belongs before any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())

    def make(settings=None, template=None, bos=True, without=""):
        vocab = {c: i for i, c in enumerate(["<s>", "</s>", "<unk>", *(b for b in bytes_ if b not in without)])}
        tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
        tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.TemplateProcessing(single=("<s> " if bos else "") + "$A </s>",
                                                                 special_tokens=[("<s>", 0), ("</s>", 1)])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.enable_truncation(5)
        tokenizer.enable_padding(length=70)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, value in (("tokenizer_config.json", settings), ("chat_template.jinja", template)):
            (tmp_path / name).unlink(missing_ok=True)
            if value is not None:
                (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return Prompter(tmp_path)
    return make


@pytest.fixture
def tiny_llm(model_dir, tmp_path):
    """Directory of a random LLM over bytes, with a chat template."""
    import transformers
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content }}\n"}
    size = len(model_dir(settings, bos=False).tokenizer.get_vocab())
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path
