"""Pretends a GPU in a child process as soon as torch is imported there."""

import importlib.abc
import importlib.util
import sys
from pathlib import Path


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def execute_and_pretend(module):
            execute(module)
            source = Path(__file__).parents[1] / "pretended_cuda.py"
            own = importlib.util.spec_from_file_location("pretended_cuda", source)
            pretended = importlib.util.module_from_spec(own)
            own.loader.exec_module(pretended)
            pretended.install()

        spec.loader.exec_module = execute_and_pretend
        return spec


sys.meta_path.insert(0, AfterTorch())
