#!/bin/sh
# Checks and measures pagec on an NVIDIA GPU, with what `make gpu-artifacts` has compiled beforehand.
#
#   tests/gpu/check.sh quick    three minutes: whether every kernel, and whole models, compute what they should
#   tests/gpu/check.sh bench    five minutes: times beside torch's and beside what the memory allows
#   tests/gpu/check.sh tune     three minutes: times the tuner's bundle
#
# Options: --artifacts DIR (build/gpu), --results DIR (tests/gpu/results), --budget SECONDS, --seed N (quick).
# Needs Python 3.11 or newer with numpy and torch, nothing installed of pagec, no network. An interrupted bench
# or tune goes on where it was. Another Python: PYTHON=... tests/gpu/check.sh quick
set -eu

mode=${1:-}
case $mode in
quick | tune) limit=180 ;;
bench) limit=300 ;;
*)
    sed -n '2,10s/^#  *//p' "$0" >&2
    exit 2
    ;;
esac

root=$(cd "$(dirname "$0")/../.." && pwd)
able='import sys, numpy, torch; sys.exit(sys.version_info < (3, 11))'
for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 "$root/.venv/bin/python"; do
    [ -n "$python" ] || continue
    "$python" -c "$able" 2>/dev/null && break
    python=
done
[ -n "$python" ] || {
    echo "check.sh: no Python 3.11 or newer with numpy and torch; name one: PYTHON=... $0 $mode" >&2
    exit 2
}

names=$(mktemp -d)
trap 'rm -rf "$names"' EXIT
mkdir "$names/pagec"
for package in compiler runtime templates configs autotune; do
    ln -s "$root/$package" "$names/pagec/$package"
done

PYTHONPATH="$names:$root/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    timeout --kill-after 10 "$limit" "$python" -m gpu "$@"
