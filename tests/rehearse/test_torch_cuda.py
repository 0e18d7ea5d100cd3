"""Answers of torch.cuda, and objects that survive `.to("cuda")`."""

from __future__ import annotations


def test_parameters_keep_their_identity(seen):
    assert seen["same_objects"] is True
    assert seen["moved"] == "cuda:0"


def test_tied_weights_stay_tied_and_count_once(seen):
    assert seen["tied"] is True
    assert seen["tied_bytes"] == 512  # 11 x 4 x 4 bytes, rounded up


def test_an_optimizer_built_before_the_move_updates_on_the_device(seen):
    assert seen["updated"] == "cuda"


def test_pinned_memory_is_remembered(seen):
    assert seen["pinned"] == [False, True]


def test_the_device_answers_for_itself(seen):
    assert seen["props"] == ["NVIDIA A100-SXM4-80GB", 108]


def test_nccl_is_there_for_scripts_that_ask_before_they_use_bf16(seen):
    assert seen["nccl"] is True


def test_memory_stats_count_active_bytes(seen):
    assert seen["active"] is True


def test_generators_of_the_device_work(seen):
    assert seen["generator"] == [3]
