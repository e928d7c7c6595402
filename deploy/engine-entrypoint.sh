#!/bin/sh
# Starts an engine that tells others the address of its NIXL side channel: an address, because a socket cannot
# be bound to a host's name.
set -eu
: "${VLLM_NIXL_SIDE_CHANNEL_HOST:=$(hostname -i | cut -d' ' -f1)}"
export VLLM_NIXL_SIDE_CHANNEL_HOST
exec "$@"
