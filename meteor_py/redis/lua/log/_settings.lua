-- Library for scripts that write a stream's settings.
-- These settings are in a separate key, which only administrators may write. meta has copies, for
-- releases before 0.3, for clients that may not read the key, and for scripts, which use `group_by` and
-- `store`. For a stream from such a release, convert_settings creates the key from the copies.

local is_setting = {
  codec = true, compression = true, checksum = true, group_by = true, store = true,
  store_before = true, store_uri = true, retain = true, retain_bytes = true,
}

-- Copy this incarnation's settings from meta.
local function copy_settings(meta_key, settings_key)
  redis.call('DEL', settings_key)
  redis.call('HSET', settings_key, 'incarnation', redis.call('HGET', meta_key, 'incarnation'))
  for field in pairs(is_setting) do
    local value = redis.call('HGET', meta_key, field)
    if value then redis.call('HSET', settings_key, field, value) end
  end
end
