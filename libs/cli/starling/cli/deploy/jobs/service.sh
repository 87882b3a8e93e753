#!/bin/bash
# A service of a run as a task of a scheduler, started again when it dies:
#
#   service.sh ROLE [NUMBER_OF_FIRST NODES_OF_EACH --SECTION.KEY VALUE ...]
#
# RUN: the folder of the run. RDZV: where the nodes of a replica meet. INTERFACE: the network card to use. PROGRAM: the
# `starling` command. TASK: the number of this task among those of its role, where Slurm does not give it.
set -u

# Print the address at which other hosts of the run reach this one.
address() {
  if [ -n "${INTERFACE:-}" ]; then
    ip -4 -brief address show dev "$INTERFACE" | awk '{ sub("/.*", "", $3); print $3 }'
  else
    hostname --ip-address | awk '{ print $1 }'
  fi
}

# Print the address of the controller, once it listens.
controller() {
  for _ in {1..600}; do
    sed -n 's/.*"address": "\([^"]*\)".*/\1/p' "$RUN/controller.json" 2>/dev/null | grep . && return
    sleep 1
  done
  echo "$RUN/controller.json was not there for 10 minutes: the controller does not run" >&2
  return 1
}

role=$1 first=${2:-0} nodes=${3:-1} flags=("${@:4}")
if [ "$role" = address ]; then
  address
  exit
fi
task=${SLURM_PROCID:-${TASK:-0}}
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HF_HUB_DISABLE_PROGRESS_BARS=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # processes that spin on shared cores are very slow
flags+=(--network.host "$(address)")
if [ "$role" = controller ]; then
  log=controller
elif ((nodes > 1)); then
  log=$role-$first.node-$task
  flags+=(--name "$role-$first" --nnodes "$nodes" --node-rank "$task" --rdzv "$RDZV")
else
  log=$role-$((first + task))
  flags+=(--name "$log")
fi
if [ -n "${SLURM_PROCID:-}" ]; then
  exec >>"$RUN/logs/$log.log" 2>&1
else
  exec > >(tee --append "$RUN/logs/$log.log") 2>&1
fi

stopping=0 service=
trap 'stopping=1; kill -USR2 $service' TERM INT USR2 # USR2: a service that has got the first two itself ignores it
trap '' USR1                                         # asks a policy for a state
tries=0
while :; do
  begun=$SECONDS where=()
  if [ "$role" != controller ]; then
    found=$(controller) || exit
    where=(--controller "$found")
  fi
  echo "$(date --iso-8601=seconds) $role on ${SLURMD_NODENAME:-$HOSTNAME}, GPUs: ${CUDA_VISIBLE_DEVICES:-none}"
  "${PROGRAM:-starling}" "$role" --config "$RUN/config.toml" --dir "$RUN" "${where[@]}" "${flags[@]}" &
  service=$!
  while wait "$service"; code=$?; ((code > 128)) && kill -0 "$service" 2>/dev/null; do :; done
  ((stopping)) && exit "$code"
  # 75 and signals ask for a restart; the controller exits with 1 because the run has failed; 2 is a wrong setting.
  case $role,$code in *,0 | *,2 | controller,1) exit "$code" ;; esac
  ((SECONDS - begun < 600)) || tries=0
  ((++tries < 4)) || exit "$code"
  sleep "$tries"
done
