package node

// ConflistName, RemoveConflist and RemovePlugin stand here until the keeper of the CNI configuration has them.

const ConflistName = "00-stayput.conflist"

func RemoveConflist(Options) (removed bool, err error) { return false, nil }
func RemovePlugin(Options) (removed bool, err error)   { return false, nil }
