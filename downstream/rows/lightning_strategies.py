from _rows import Rows

rows = Rows("Lightning", environment="lightning", versions=("lightning",))
