// Package wire reads protobuf messages field by field. Of what the API server sends of a pod the agent needs little,
// and there is much of it: what is not asked for is not decoded.
//
// The encoding is that of https://protobuf.dev/programming-guides/encoding. The numbers of the fields of Kubernetes'
// objects are those of the generated.proto of k8s.io/api and k8s.io/apimachinery.
package wire

import "google.golang.org/protobuf/encoding/protowire"

// Field is one field of a message. What it has of the message is shared with it.
type Field struct {
	Number protowire.Number
	Varint uint64 // the value of a number or a bool
	Bytes  []byte // the value of a string, of bytes or of a message
	Whole  []byte // the field with its tag
}

// Each calls f with each field of a message, once for each time that the message has it, until f returns an error. It
// returns that, or what is wrong with the message.
func Each(message []byte, f func(Field) error) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		one, size := Field{Number: number}, 0
		switch kind {
		case protowire.BytesType:
			one.Bytes, size = protowire.ConsumeBytes(message[n:])
		case protowire.VarintType:
			one.Varint, size = protowire.ConsumeVarint(message[n:])
		default:
			size = protowire.ConsumeFieldValue(number, kind, message[n:])
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		one.Whole, message = message[:n+size], message[n+size:]
		if err := f(one); err != nil {
			return err
		}
	}
	return nil
}
