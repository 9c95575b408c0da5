#!/bin/sh
# Succeed if Redis answers a client with the password in SECRETS and has loaded its data:
#
#     ready.sh SECRETS [OPTION OF redis-cli…]
set -eu
REDISCLI_AUTH=$(tr -d '[:space:]' <"$1/redis_password")
export REDISCLI_AUTH
shift
[ "$(redis-cli "$@" --no-auth-warning ping)" = PONG ]
