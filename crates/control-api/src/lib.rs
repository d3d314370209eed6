//! The gRPC interfaces of Ashlar's daemons, generated from `proto/`: control of a storage node and
//! attachments of an initiator. Field comments are in the `.proto` files.

// The module tree repeats the package names, because generated code refers to them by path.
mod generated {
    #![allow(missing_docs, clippy::all)]
    pub mod storage_node {
        pub mod v1 {
            tonic::include_proto!("ashlar.storage_node.v1");
        }
    }
    pub mod initiator {
        pub mod v1 {
            tonic::include_proto!("ashlar.initiator.v1");
        }
    }
}

pub use generated::initiator::v1 as initiator;
pub use generated::storage_node::v1 as storage_node;
