"""A real instruction-tuned LLM and real questions for the tests that need them."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
