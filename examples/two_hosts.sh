#!/usr/bin/env bash
# Trains on two simulated hosts: two network namespaces on this machine, connected by a virtual cable, with one rank in each.
# Needs root (`ip netns`). Usage: examples/two_hosts.sh [OUT] [settings of `xbm train glyphs`]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/two_hosts}
shift || true
python=${PYTHON:-.venv/bin/python}
one=xbm-one-$$ two=xbm-two-$$

if ! ip netns add "$one" 2>/dev/null; then
  echo "network namespaces are not permitted here (ip netns add failed): run this as root" >&2
  exit 77
fi
trap 'ip netns del "$one" 2>/dev/null; ip netns del "$two" 2>/dev/null' EXIT
ip netns add "$two"
ip link add xa$$ netns "$one" type veth peer name xb$$ netns "$two"
for side in "$one xa$$ 10.77.0.1" "$two xb$$ 10.77.0.2"; do
  read -r host cable address <<<"$side"
  ip -n "$host" address add "$address/24" dev "$cable"
  ip -n "$host" link set "$cable" up
  ip -n "$host" link set lo up
done

start() { # host, cable, number, what to train
  ip netns exec "$1" env GLOO_SOCKET_IFNAME="$2" OMP_NUM_THREADS=1 "$python" -m torch.distributed.run \
    --nnodes 2 --node-rank "$3" --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29511 -m xbm train "${@:4}"
}
start "$one" xa$$ 0 glyphs --out "$out" "$@" &
first=$!
start "$two" xb$$ 1 glyphs --out "$out" "$@" &
second=$!
status=0
wait "$first" || status=$?
wait "$second" || status=$?
echo "bytes that went over the cable from the first host: $(ip netns exec "$one" cat /sys/class/net/xa$$/statistics/tx_bytes)"
exit "$status"
