"""Run scripts of this folder in this process and compare them; separate processes would take seconds each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leanstep.prove.compare import PairProof, judge
from leanstep.prove.script_jobs import Job, capture_script

SCRIPTS = Path(__file__).parent / "scripts"


def job(script: str, *argv: str, **options) -> Job:
    return Job(str(SCRIPTS / script), argv, **options)


def prove_pair(before: Job, after: Job) -> PairProof:
    proof = PairProof(before.label, after.label)
    runs = [capture_script(each) for each in (before, after, replace(before, twin=True))]
    return judge(proof, *runs)
