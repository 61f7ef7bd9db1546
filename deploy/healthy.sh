#!/bin/sh
# Health check of a service's container: healthy.sh SERVICE. Docker restarts what ends, but nothing that hangs: so this
# ends a service that has answered before and is silent twice in a row. One that starts, is not ready or has no broker
# is left alone. healthy.sh nats asks the broker of its container; with js-enabled-only=true as the second argument it is
# healthy without the other servers of its cluster, too.
set -u
if [ "$1" = nats ]; then
    exec python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8222/healthz?${2:-}').close()"
fi
answered=/tmp/answered
silent=/tmp/silent
pagewire status --service "$1" --here
code=$?
if [ $code -ne 3 ]; then
    rm -f "$silent"
    [ $code -ne 0 ] || touch "$answered"
elif [ -e "$silent" ] && [ -e "$answered" ]; then
    rm -f "$silent" "$answered"
    for process in $(cat /proc/1/task/1/children); do # those of the container's init
        ! grep -q "services.$1" "/proc/$process/cmdline" || kill -KILL "$process"
    done
else
    touch "$silent"
fi
exit $code
