"""Where the Spark data source ``meteor`` lives. Nothing is released here yet."""
