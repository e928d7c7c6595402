#!/bin/sh
# Starts an engine that tells others the address of its NIXL side channel: an address, because a socket cannot
# be bound to a host's name. With OTLP_ENDPOINT set, vLLM and the connector in it send their spans there.
set -eu
: "${VLLM_NIXL_SIDE_CHANNEL_HOST:=$(hostname -i | cut -d' ' -f1)}"
export VLLM_NIXL_SIDE_CHANNEL_HOST
if [ -n "${OTLP_ENDPOINT:-}" ] && [ "${1:-} ${2:-}" = "vllm serve" ]; then
    export OTEL_SERVICE_NAME="${OTEL_SERVICE_NAME:-vllm}"
    set -- "$@" "--otlp-traces-endpoint=$OTLP_ENDPOINT"
fi
exec "$@"
