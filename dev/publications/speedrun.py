"""Logs of the NanoGPT speedrun: each begins with its script, taken from your clone by dev/speedrun_logs.py.

step_ms: the logged mean over the steps that the note names, all of the stage that is rehearsed. A record that
warms its kernels up has the first stage's windows and batch in the first of these steps; some evaluate once
in each of them, which is left out. Where Adam has every second turn, both rehearsed steps of 2026 have it,
because the warm-up visits no other pair of steps of the first stage.
"""

PUBLISHED = {
    "source": "https://github.com/KellerJordan/modded-nanogpt",
    "role": "blind",
    "class": "speedrun, compiled",
    "device": "h100",
    "ranks": 8,
    "steps": 4,
    "rows": {
        "speedrun-2024-10-10-muon": {
            "date": "2024-10-10",
            "log": "2024-10-10_Muon/eb5659d0-fb6a-49e5-a311-f1f89412f726.txt",
            "step_ms": 213.2,
            "note": "steps 12 to 40",
        },
        "speedrun-2024-10-14-modern": {
            "date": "2024-10-14",
            "log": "2024-10-14_ModernArch/dabaaddd-237c-4ec9-939d-6608a9ed5e27.txt",
            "step_ms": 176.4,
            "note": "steps 12 to 40",
        },
        "speedrun-2024-10-17-distributed": {
            "date": "2024-10-17",
            "log": "2024-10-17_DistributedMuon/22d24867-eb5a-4fcc-ae2c-263d0277dfd1.txt",
            "step_ms": 153.3,
            "note": "steps 12 to 40",
        },
        "speedrun-2024-11-10-unet": {
            "date": "2024-11-10",
            "log": "2024-11-10_UNetDoubleLr/c87bb826-797b-4f37-98c7-d3a5dad2de74.txt",
            "step_ms": 144.2,
            "role": "development",
            "note": "steps 12 to 40; attention of cuDNN, not known before this row",
        },
        "speedrun-2024-11-19-flex": {
            "date": "2024-11-19",
            "log": "2024-11-19_FlexAttention/8384493d-dba9-4991-b16b-8696953f5e6d.txt",
            "step_ms": 160.1,
            "note": "steps 12 to 40",
        },
        "speedrun-2024-12-10-mfu": {
            "date": "2024-12-10",
            "log": "2024-12-10_MFUTweaks/04df8c70-2462-4b6c-9e49-c7589b321a81.txt",
            "step_ms": 142.9,
            "allocated_gib": 33.44,
            "note": "steps 12 to 40",
        },
        "speedrun-2025-01-13-fp8head": {
            "date": "2025-01-13",
            "log": "2025-01-13_Fp8LmHead/c51969c2-d04c-40a7-bcea-c092c3c2d11a.txt",
            "step_ms": 124.1,
            "allocated_gib": 36.74,
            "note": "steps 12 to 40",
        },
        "speedrun-2025-01-26-batch": {
            "date": "2025-01-26",
            "log": "2025-01-26_BatchSize/0bdd5ee9-ac28-4202-bdf1-c906b102b0ec.txt",
            "step_ms": 94.2,
            "allocated_gib": 29.20,
            "role": "development",
            "note": "steps 12 to 40; compiled memory was changed with this row in view",
        },
        "speedrun-2025-05-30-noallreduce": {
            "date": "2025-05-30",
            "log": "2025-05-30_noallreduce/8054c239-3a18-499e-b0c8-dbd27cb4b3ab.txt",
            "step_ms": 94.6,
            "allocated_gib": 29.09,
            "role": "development",
            "note": "steps 12 to 40; flex_attention under autocast was priced in fp32 before this row",
        },
        "speedrun-2025-09-03-fa3": {
            "date": "2025-09-03",
            "log": "2025-09-03_FA3/44fc1276-0510-4961-92c0-730c65e5feba.txt",
            "step_ms": 95.9,
            "allocated_gib": 33.42,
            "note": "steps 12 to 40",
        },
        "speedrun-2025-10-24-normuon": {
            "date": "2025-10-24",
            "log": "2025-10-24_NorMuon/088a77ee-9b67-475a-bbb9-3e92e4698799.txt",
            "step_ms": 60.6,
            "note": "steps 12 to 40, where Adam runs in every second step; in every step rehearsed",
        },
        "speedrun-2025-12-11-optims": {
            "date": "2025-12-11",
            "log": "2025-12-11_NorMuonOptimsAndFixes/82edf6be-f343-475d-b93a-47c32acf4de2.txt",
            "step_ms": 33.64,
            "mean_of": 2,
            "note": "steps 12 to 40",
        },
        "speedrun-2026-01-16-softcap": {
            "date": "2026-01-16",
            "log": "2026-01-16_FusedSoftcappedEntropy/45beba56-93e2-4995-bc5b-caff3cb2c1b5.txt",
            "step_ms": 32.54,
            "mean_of": 2,
            "without": "scoring",
            "steps": 3,
            "role": "development",  # the evaluation was left out after a first prediction
            "note": "steps 12 to 40",
        },
        "speedrun-2026-02-16-flatten": {
            "date": "2026-02-16",
            "log": "2026-02-16_FlattenForward/pr233/2026-02-16_21-30-05_time-362_secs_F-inject-post-attn_9f12a3.txt",  # noqa: E501
            "step_ms": 32.50,
            "mean_of": 2,
            "without": "scoring",
            "steps": 3,
            "role": "development",  # the evaluation was left out after a first prediction
            "note": "steps 12 to 40",
        },
        "speedrun-2026-04-08-paired": {
            "date": "2026-04-08",
            "log": "2026-04-08_PairedHeadMuon/logs/split_qk0-1480.txt",
            "step_ms": 32.43,
            "mean_of": 2,
            "without": "scoring",
            "steps": 3,
            "role": "development",  # the evaluation was left out after a first prediction
            "note": "steps 12 to 40",
        },
        "speedrun-2026-05-19-fp8up": {
            "date": "2026-05-19",
            "log": "2026-05-19_FP8MLPUpProj/this_record/008bb79d-d5bc-4205-bd4e-5e4ae82e658c.txt",
            "step_ms": 31.04,
            "mean_of": 2,
            "without": "scoring",
            "steps": 3,
            "role": "development",  # the rehearsed steps were chosen after a first prediction
            "note": "steps 12 to 40",
        },
        "speedrun-2026-07-17-fp8down": {
            "date": "2026-07-17",
            "log": "2026-07-17_FP8DownProjection/this_pr/11cb620c-daaf-4e85-83fc-258a5eb7ba09.txt",
            "step_ms": 31.40,
            "mean_of": 2,
            "without": "scoring",
            "steps": 3,
            "role": "development",  # the rehearsed steps were chosen after a first prediction
            "note": "steps 40 to 80",
        },
        "speedrun-2026-08-01-main": {
            "date": "2026-08-01",
            "log": "train_gpt.py",
            "step_ms": 31.40,
            "mean_of": 2,
            "without": "scoring",
            "steps": 3,
            "role": "development",  # the rehearsed steps were chosen after a first prediction
            "note": "the newest commit's script beside the last record's log, steps 40 to 80",
        },
    },
}
