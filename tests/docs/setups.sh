# What pages may call in blocks that their readers do not see: waiting, and the servers and logs that examples speak of.

# eventually COMMAND…: until it succeeds, or two minutes are over: what is compiled first may take one.
eventually() {
    local end=$((SECONDS + 120))
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $end ]; then
            echo "still not so after two minutes: $*" >&2
            return 1
        fi
        sleep 0.05
    done
}

# listening HOST:PORT: whether somebody does.
listening() {
    (exec 3<>"/dev/tcp/${1%:*}/${1#*:}")
}

# all_follow URI MEMBERS: whether all is well and each of so many members follows each other: then all know where the
# others are.
all_follow() {
    flowstone status --json "$1" | python -c '
import json, sys
told, members = json.load(sys.stdin), int(sys.argv[1])
(one,) = told["replicasets"]
registered = [member["uuid"] for member in one["members"] if member["id"]]
links = [link for link in one["links"] if link["follower"] in registered]
following = [link for link in links if link["status"] == link["downstream"] == "follow"]
assert told["is_healthy"] and len(following) == members * (members - 1)' "$2"
}

# all_have URI: whether every member has all that any of them has.
all_have() {
    flowstone status --json "$1" | python -c '
import json, sys
(one,) = json.load(sys.stdin)["replicasets"]
for member in one["members"]:
    assert all(member["vclock"].get(id, 0) >= lsn for id, lsn in one["vclock"].items() if id != "0")'
}

# nobody_follows URI: whether all that answer have noticed that nobody else is there any more.
nobody_follows() {
    { flowstone status --json "$1" || :; } | python -c '
import json, sys
(one,) = json.load(sys.stdin)["replicasets"]
assert not any(link["status"] == "follow" for link in one["links"])'
}

# archived URI DIRECTORY: whether readers of the archive find all that the server has: it says so itself, once a second.
archived() {
    flowstone status --json "$1" | python -c '
import json, sys
(one,) = json.load(sys.stdin)["replicasets"]
with open(sys.argv[1] + "/manifest.json") as manifest:
    assert json.load(manifest)["settled"] == one["vclock"]' "$2"
}

# stop_running: ends what the last block that keeps running has started, and waits for it.
stop_running() {
    local subshell=$!
    pkill -TERM -P "$subshell" || :
    wait "$subshell" || :
}

# real_server HOST:PORT DIRECTORY: a real Tarantool with a small shop, whose guests may do everything.
real_server() {
    mkdir -p "$2"
    cat >"$2/server.lua" <<LUA
box.cfg{listen = '$1', log = 'server.log', replication_synchro_quorum = 1}
box.schema.user.grant('guest', 'super', nil, nil, {if_not_exists = true})
box.schema.user.passwd('admin', 'secret')
local orders = box.schema.space.create('orders', {if_not_exists = true, format = {
    {'id', 'unsigned'}, {'customer', 'string'}, {'total', 'unsigned'}}})
orders:create_index('primary', {if_not_exists = true})
local users = box.schema.space.create('users', {if_not_exists = true, format = {
    {'id', 'unsigned'}, {'name', 'string'}, {'email', 'string', is_nullable = true}}})
users:create_index('primary', {if_not_exists = true})
for id, name in ipairs({'Ada', 'Grace', 'Alan'}) do
    users:replace{id, name, name:lower() .. '@example.org'}
    for order = 1, 10 do
        orders:replace{id * 10 + order, name, order * 5}
    end
end
require('log').info('the shop is open')
LUA
    (cd "$2" && exec tarantool server.lua >/dev/null 2>&1) &
    eventually grep -q "the shop is open" "$2/server.log"
}

# shop_log DIRECTORY: a snapshot and two logs of an elected leader, with one synchronous order confirmed, one rolled back.
shop_log() {
    mkdir -p "$(dirname "$1")"
    python - "$1" <<'PYTHON'
import sys
from flowstone.cli.demo.shop import write_shop
from flowstone.outside import production

write_shop(production(), sys.argv[1])
PYTHON
}

# limestone_log DIRECTORY: a Limestone of 900 epochs, most of them empty, with two storages.
limestone_log() {
    mkdir -p "$1"
    python - "$1" <<'PYTHON'
import sys
from flowstone.limestone import Datastore

with Datastore(sys.argv[1]) as store:
    channel = store.create_channel()
    store.ready()
    for epoch in (1, 2, 812, 900):
        store.switch_epoch(epoch)
        channel.begin_session()
        channel.add_entries(1, [b"key %d" % n for n in range(epoch % 10)], [b"value"] * (epoch % 10), (epoch, 1))
        channel.add_entry(2, b"epoch", b"%d" % epoch, (epoch, 100))
        channel.end_session()
    store.switch_epoch(901)
PYTHON
}

# crashed_limestone DIRECTORY: what a real one left when it died between a session and the end of its epoch.
crashed_limestone() {
    mkdir -p "$(dirname "$1")"
    cp -r "$DOCS_CLONE/tests/vectors/limestone/tail/dir-before-reopen" "$1"
}

# tsurugi_log DIRECTORY: what a real Tsurugi wrote: tables with every type, altered, dropped and created again.
tsurugi_log() {
    mkdir -p "$(dirname "$1")"
    cp -r "$DOCS_CLONE/tests/vectors/tsurugi/basic/log" "$1"
}

# noon: this moment is noon of the first of May, in what follows. It lies behind all that was written, by two milliseconds.
noon() {
    sleep 0.002
    date -u +%FT%T.%6NZ >~/.run/noon
    sleep 0.002
}
