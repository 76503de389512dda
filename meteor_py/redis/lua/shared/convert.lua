#!lua flags=allow-oom
return {"OK"}
