"""``posttrain serve`` as it is typed: a process, an address, an answer, and an end."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from byte_models import SAID, taught_model

openai = pytest.importorskip("openai")


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = taught_model(tmp_path / "taught")
    command = [sys.executable, "-m", "posttrain", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "POSTTRAIN_API_KEY": "secret"},
    )
    assert process.stdout is not None
    with process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1\n", lines[0]), lines
            assert "'taught'" in lines[1]
            with openai.OpenAI(base_url=lines[0].strip(), api_key="secret") as client:
                chat = [{"role": "user", "content": "Speak."}]
                found = client.chat.completions.create(model="taught", messages=chat, temperature=0)
            assert found.choices[0].message.content == SAID
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
    assert code in (0, 130, -signal.SIGINT)


def test_another_host_needs_a_key() -> None:
    from posttrain.cli.model_commands import serve

    with pytest.raises(ValueError, match="others can reach it; set --api-key"):
        serve("tiny", host="0.0.0.0")
