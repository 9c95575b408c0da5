#!/bin/sh
# Succeed if Redis replies at all, even that it loads its data or cannot write to its disk:
#
#     alive.sh SECRETS [OPTION OF redis-cli…]
#
# A restart would help with neither.
set -eu
REDISCLI_AUTH=$(tr -d '[:space:]' <"$1/redis_password")
export REDISCLI_AUTH
shift
[ -n "$(redis-cli "$@" --no-auth-warning ping)" ]
