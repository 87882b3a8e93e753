"""Lua scripts of the Redis store: each is one step that no other instance can interrupt. All of them may be repeated.

Keys, after the prefix:

- ``request:ID``: a hash. Of a pending request `request` (the record), `owner`, `samples`, `bytes` and `deaths`; of a
  finished one `result`; of a removed one, whose owner may not know it yet, `removed`.
- ``lease:INSTANCE``: is there as long as the instance is alive; it renews it.
- ``owned:INSTANCE``: the set of its pending requests; ``instances``: the set of instances that may have some.
- ``free``: the set of pending requests that instances gave back when they stopped.
"""

from __future__ import annotations

from typing import Final

_HEAD: Final = """
local prefix = KEYS[1]
local function request(id) return prefix .. 'request:' .. id end
local function owned(instance) return prefix .. 'owned:' .. instance end
local function fields(key, ...)
  local found = redis.pcall('HMGET', key, ...)
  if found.err then return nil end
  return found
end
"""

PUT: Final = f"""{_HEAD}
local id, me, record, samples, bytes, ttl_ms = unpack(ARGV)
local key = request(id)
redis.call('HSET', key, 'request', record, 'owner', me, 'samples', samples, 'bytes', bytes, 'deaths', 0)
redis.call('PEXPIRE', key, ttl_ms)
redis.call('SADD', owned(me), id)
redis.call('PEXPIRE', owned(me), ttl_ms)
redis.call('SADD', prefix .. 'instances', me)
redis.call('PEXPIRE', prefix .. 'instances', ttl_ms)
return 1
"""
"""ARGV: id, instance, record, samples, bytes, time to live. Stores a pending request."""

FINISH: Final = f"""{_HEAD}
local id, me, result, ttl_ms = unpack(ARGV)
local key = request(id)
redis.call('SREM', owned(me), id)
local found = fields(key, 'result', 'removed', 'owner')
if found then
  if found[1] then return found[1] end
  if found[2] then return 0 end
  if found[3] then redis.call('SREM', owned(found[3]), id) end
  redis.call('SREM', prefix .. 'free', id)
end
redis.call('DEL', key)
redis.call('HSET', key, 'result', result)
redis.call('PEXPIRE', key, ttl_ms)
return 1
"""
"""ARGV: id, instance, result, time to live. Returns 1; the first result if there is one; 0 if it was removed.

A request that Redis has lost gets its result all the same: its instance had accepted it."""

REMOVE: Final = f"""{_HEAD}
local id, ttl_ms = unpack(ARGV)
local key = request(id)
local found = fields(key, 'result', 'removed', 'owner')
if not found or found[2] or not (found[1] or found[3]) then return 0 end
redis.call('DEL', key)
if found[3] then
  redis.call('SREM', owned(found[3]), id)
  redis.call('SREM', prefix .. 'free', id)
  redis.call('HSET', key, 'removed', 1)
  redis.call('PEXPIRE', key, ttl_ms)
end
return 1
"""
"""ARGV: id, time to live of the note for its owner. Returns whether there was such a request."""

RENEW: Final = f"""{_HEAD}
local me, lease_ms, ttl_ms = unpack(ARGV)
redis.call('DEL', prefix .. 'lease:' .. me) -- a script that has written is not refused where memory is full
redis.call('SET', prefix .. 'lease:' .. me, 1, 'PX', lease_ms)
redis.call('SADD', prefix .. 'instances', me)
redis.call('PEXPIRE', prefix .. 'instances', ttl_ms)
redis.call('PEXPIRE', owned(me), ttl_ms)
return 1
"""
"""ARGV: instance, duration of its lease, time to live of its set."""

TAKE: Final = f"""{_HEAD}
local me, from_dead, max_num, max_samples, max_bytes, ttl_ms = unpack(ARGV)
max_num, max_samples, max_bytes = tonumber(max_num), tonumber(max_samples), tonumber(max_bytes)
local taken, samples, bytes = {{}}, 0, 0
local function has_room()
  return #taken == 0 or (#taken < max_num and samples < max_samples and bytes < max_bytes)
end
local function take_from(set, died)
  while has_room() do
    local id = redis.call('SPOP', set)
    if not id then return end
    local key = request(id)
    local found = fields(key, 'request', 'samples', 'bytes', 'deaths')
    if found and found[1] then
      local deaths = (tonumber(found[4]) or 0) + died
      redis.call('HSET', key, 'owner', me, 'deaths', deaths)
      redis.call('PEXPIRE', key, ttl_ms)
      redis.call('SADD', owned(me), id)
      samples = samples + (tonumber(found[2]) or 1)
      bytes = bytes + (tonumber(found[3]) or 0)
      taken[#taken + 1] = {{id, found[1], tonumber(found[2]) or 0, deaths}}
    end
  end
end
take_from(prefix .. 'free', 0)
if from_dead == '1' and redis.call('EXISTS', prefix .. 'lease:' .. me) == 1 then -- else all may have lost theirs
  for _, other in ipairs(redis.call('SMEMBERS', prefix .. 'instances')) do
    if other ~= me and redis.call('EXISTS', prefix .. 'lease:' .. other) == 0 then
      take_from(owned(other), 1)
      if redis.call('EXISTS', owned(other)) == 0 then redis.call('SREM', prefix .. 'instances', other) end
    end
  end
end
if #taken > 0 then
  redis.call('PEXPIRE', owned(me), ttl_ms)
  redis.call('SADD', prefix .. 'instances', me) -- it may have released all before this was carried out
  redis.call('PEXPIRE', prefix .. 'instances', ttl_ms)
end
return taken
"""
"""ARGV: instance, whether to take from those without a lease, limits, time to live.

Returns of each request its id, record, samples and deaths."""

RELEASE: Final = f"""{_HEAD}
local me, ttl_ms = unpack(ARGV)
redis.call('SUNIONSTORE', prefix .. 'free', prefix .. 'free', owned(me))
redis.call('PEXPIRE', prefix .. 'free', ttl_ms)
redis.call('DEL', owned(me), prefix .. 'lease:' .. me)
redis.call('SREM', prefix .. 'instances', me)
return 1
"""
"""ARGV: instance, time to live. Gives all its requests back."""
