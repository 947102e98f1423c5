// Empty does nothing: its start-up time is the lower bound for every program of its kind.
package main

func main() {}
