"""What the README promises, typed as it stands there."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import OWN, ROOT, Ran, left_behind
from PIL import Image

COMMANDS = re.findall(r"`python -m pipeline ([^`]*=[^`]*)`", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("command", [each for each in COMMANDS if "data.path=" not in each])
def test_every_command_of_the_readme_is_one_that_can_be_planned(pipeline, command):
    ran: Ran = pipeline(*re.sub(r"^predict |mode=\w+", "", command).split(), "mode=plan")
    assert ran.code == 0, ran.err


def test_a_folder_of_images_is_trained_on_with_the_two_commands_of_the_readme(tmp_path):
    random = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog", "owl")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for place in range(40):
            pixels = random.integers(0, 99, (12, 16, 3)) + 50 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{place}.png")
    text = (ROOT / "README.md").read_text()
    found = re.search(r"\n    python (-m pipeline prepare .*)\n    python (-m pipeline data=tfrecord .*)\n", text)
    assert found
    outs = []
    for command in found.groups():
        environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{OWN}", "COLUMNS": "120"}
        ran = subprocess.run(
            [sys.executable, *command.split()], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stderr
        outs.append(ran.stdout)
    assert "cat 32, dog 32, owl 32" in outs[0]
    assert "FINISHED" in outs[1]
    assert "speedup" in outs[1]
    assert not left_behind(tmp_path)
