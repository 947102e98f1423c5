// Empty does nothing: what it takes to start it is the floor under every program of its kind.
package main

func main() {}
