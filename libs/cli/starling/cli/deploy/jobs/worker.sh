# A worker of a job of DGX Cloud Lepton: starts its share of the services of a run, and ends with them. Worker 0 has the
# controller, which goes on from its journal when the job is started again.
set -u

worker=${LEPTON_JOB_WORKER_INDEX:-0}
RUN=@FOLDER@/${LEPTON_JOB_NAME:-run}
export RUN PROGRAM=@PROGRAM@
service=$(mktemp)
cat >"$service" <<'SERVICE'
@SERVICE@
SERVICE

# Print the name of a worker's host: NUMBER
host() { echo "${LEPTON_JOB_WORKER_PREFIX:-worker}-$1.${LEPTON_SUBDOMAIN:-localdomain}"; }

# Start a task of a role: GPUS TASK MEETING_WORKER ROLE FIRST NODES [--SECTION.KEY VALUE ...]
start() {
  local port=29400
  [ "$4" = policy ] || port=$((29401 + $5))
  CUDA_VISIBLE_DEVICES=$1 TASK=$2 RDZV=$(host "$3"):$port bash "$service" "${@:4}" &
  services+=($!)
}

# Wait for a process, also when a signal arrives meanwhile. Returns its exit code.
await() {
  local code
  while wait "$1"; code=$?; ((code > 128)) && kill -0 "$1" 2>/dev/null; do :; done
  return "$code"
}

services=() code=0
trap '((${#services[@]} == 0)) || kill "${services[@]}"' TERM INT
mkdir -p "$RUN/logs" || exit
if ((worker == 0)); then
  rm -f "$RUN/controller.json" # of an earlier start
  recipe=$RUN/recipe.toml settings=()
  if [ ! -e "$recipe" ]; then
    recipe=$(mktemp --suffix=.toml) settings=(--network.port 20000@SETTINGS@)
    cat >"$recipe" <<'RECIPE'
@RECIPE@
RECIPE
  fi
  "$PROGRAM" prepare "$recipe" --dir "$RUN" "${settings[@]}" || exit
  start "" 0 0 controller 0 1
fi
case $worker in
@SERVICES@
esac
if ((worker == 0)); then # the others end with the controller
  await "${services[0]}"
  code=$?
  for _ in {1..60}; do
    kill -0 "${services[@]:1}" 2>/dev/null || break
    sleep 1
  done
  kill "${services[@]:1}" 2>/dev/null
fi
for one in "${services[@]}"; do
  await "$one"
  ended=$?
  ((worker == 0 || ended == 0)) || code=$ended
done
exit "$code"
