#!/usr/bin/env bash
# GRPO with tool calls (retool) on Qwen3-4B: four GPUs, slime, log-probs by leanstep.
#
# In slime's train.py import parse_args from leanstep.integrations.slime (docs/integrations.md), install leanstep on every
# node, and set the folders below. Tool output is most of a retool trace and is masked, so the third flag pays too.
set -euo pipefail

SLIME=${SLIME:-$HOME/slime}
MEGATRON=${MEGATRON:-$HOME/Megatron-LM}
DATA=${DATA:-$HOME/data}
CHECKPOINT=${CHECKPOINT:-$HOME/checkpoints/qwen3-4b-sft}
GPUS=${GPUS:-4}

# Defines MODEL_ARGS.
source "$SLIME/scripts/models/qwen3-4B.sh"

LEANSTEP_ARGS=(
   # The output layer returns hidden states; the logits never exist.
   --log-probs-from-hidden
   # In the policy loss, leave out rows whose loss mask is 0: what the tools wrote.
   --log-probs-loss-mask-only
)

CHECKPOINT_ARGS=(
   --hf-checkpoint "$CHECKPOINT"
   --ref-load "${CHECKPOINT}_torch_dist"
   --save "${CHECKPOINT}_retool"
   --save-interval 20
   --rotary-base 5000000
)

ROLLOUT_ARGS=(
   --prompt-data "$DATA/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --reward-key score
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 256
   --balance-data
   --custom-generate-function-path generate_with_retool.generate
   --custom-rm-path generate_with_retool.reward_func
)

TRAIN_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

PARALLEL_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   # Without logits this is bounded by activations, no longer by tokens times vocabulary.
   --max-tokens-per-gpu 9216
)

ENGINE_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

ray start --head --num-gpus "$GPUS" --disable-usage-stats
cd "$SLIME"
ray job submit --address http://127.0.0.1:8265 \
   --runtime-env-json "{\"env_vars\": {
      \"PYTHONPATH\": \"$MEGATRON:$SLIME:$SLIME/examples/retool\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS" --colocate \
   "${MODEL_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${TRAIN_ARGS[@]}" "${PARALLEL_ARGS[@]}" \
   "${ENGINE_ARGS[@]}" "${LEANSTEP_ARGS[@]}"
