#!/usr/bin/env bash
# scripts/local.sh PROCESSES CONFIG [section.key=value ...]: a run in several processes on this machine, under the
# launcher. Without GPUs give the number of simulated devices, which the processes divide, e.g.
#   scripts/local.sh 2 configs/quickstart.yaml parallel.simulate_devices=4 parallel.data=4
set -euo pipefail
processes=${1:?usage: scripts/local.sh PROCESSES CONFIG [section.key=value ...]}
config=${2:?usage: scripts/local.sh PROCESSES CONFIG [section.key=value ...]}
shift 2
exec python -m jaxstack.launch --processes "$processes" -- python -m jaxstack.train --config "$config" "$@"
