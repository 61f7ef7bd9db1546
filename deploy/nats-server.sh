#!/bin/sh
# Starts nats-server with the passwords in the files of a folder, one per user: nats-server.sh FOLDER ARGUMENTS...
# The server reads a variable's value as it reads its configuration file: in quotes, a password is a string whatever it
# begins with.
set -eu
quote() {
    printf '"%s"' "$(sed 's/[\\"]/\\&/g')"
}
folder=$1
shift
for file in "$folder"/*; do
    user=$(basename "$file" | tr '[:lower:]' '[:upper:]')
    case $user in *[!A-Z]*) continue ;; esac # the keys of tenants, and configurations
    export "PAGEWIRE_NATS_${user}_PASSWORD=$(quote <"$file")"
done
PAGEWIRE_API_KEY=$(printf %s "${PAGEWIRE_API_KEY?set it to the key of the clients}" | quote)
export PAGEWIRE_API_KEY
exec nats-server "$@"
