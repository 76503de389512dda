-- Library of the scripts that write a stream's settings.
-- The settings that no script needs are in a key of their own, which only administrators may write.
-- meta has copies of them for releases before 0.3; this release reads the copies only to convert
-- a stream that such a release created.

local is_setting = {
  codec = true, compression = true, checksum = true, group_by = true, store = true,
  store_before = true, store_uri = true, retain = true, retain_bytes = true,
}

-- Write the settings of this incarnation, as meta has them.
local function copy_settings(meta_key, settings_key)
  redis.call('DEL', settings_key)
  redis.call('HSET', settings_key, 'incarnation', redis.call('HGET', meta_key, 'incarnation'))
  for field in pairs(is_setting) do
    local value = redis.call('HGET', meta_key, field)
    if value then redis.call('HSET', settings_key, field, value) end
  end
end
