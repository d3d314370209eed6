//! Compiles the .proto files with protox, so that no protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(
        ["proto/storage_node.proto", "proto/initiator.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
